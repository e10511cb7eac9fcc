"""The loader under torch: map-style, DataLoader and StatefulDataLoader, any number of workers."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock.core.errors import ConfigError, StateMismatch, UsageError
from penstock.data import Loader
from penstock.data.torch_dataset import SizedBatches, map_style, stream
from penstock.testing.corpora import numbered_corpus

# torchdata 0.11 calls what torch 2.13 deprecates; torch counts the cores of a machine that may have two.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

Make = Callable[..., Loader]
FIELDS = ("input_ids", "labels", "cu_seqlens", "position_ids", "document_ids")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("corpora")
    return {
        "web": numbered_corpus(folder / "web", [1 + (7 * i) % 43 for i in range(60)]),
        "code": numbered_corpus(folder / "code", [9] * 40),
    }


@pytest.fixture
def make(corpora: dict[str, Path]) -> Make:
    def made(names: tuple[str, ...] = ("web",), **options: Any) -> Loader:
        plain = {"sequence_length": 16, "global_batch_size": 4, "num_workers": 0}
        return Loader({name: corpora[name] for name in names}, **{**plain, **options})

    return made


def steps_of(batches: Any, count: int) -> list[list[int]]:
    """The sample ids of so many batches, sorted in each."""
    return [sorted(batch["sample_ids"].tolist()) for batch in islice(batches, count)]


def wanted(first: int, past: int) -> list[list[int]]:
    return [list(range(4 * step, 4 * step + 4)) for step in range(first, past)]


# Map style


@pytest.mark.parametrize("deliver", ["torch", "numpy"])
def test_an_item_is_one_sample_of_the_run_as_1_d_tensors(make: Make, deliver: str) -> None:
    loader = make(fields=FIELDS, deliver=deliver)
    dataset = map_style(loader)
    batch = make(fields=FIELDS).gather(torch.tensor([5, 9]).numpy())
    for row, sample in enumerate([5, 9]):
        item = dataset[sample]
        assert {name: value.dim() for name, value in item.items()} == dict.fromkeys(item, 1)
        assert item["sample_ids"].tolist() == [sample]
        for name in ("input_ids", "labels", "position_ids", "document_ids"):
            assert item[name].tolist() == batch[name][row].tolist()
        breaks = torch.where(torch.diff(item["document_ids"]))[0] + 1
        assert item["cu_seqlens"].tolist() == [0, *breaks.tolist(), 16]


def test_the_length_is_one_epoch_or_what_the_caps_allow(make: Make) -> None:
    loader = make()
    assert len(map_style(loader)) == loader.samples_per_epoch["web"]
    assert len(map_style(make(epochs={"web": 3}))) == 3 * loader.samples_per_epoch["web"]


def test_the_length_of_a_mixture_ends_with_the_first_pass_over_a_corpus(make: Make) -> None:
    loader = make(("web", "code"), weights={"web": 1, "code": 3})
    epoch = loader.samples_per_epoch["code"]
    assert len(map_style(loader)) == epoch * 4 // 3


def test_a_negative_number_is_no_sample(make: Make) -> None:
    with pytest.raises(IndexError, match="numbered from 0"):
        map_style(make())[-1]


@pytest.mark.parametrize(("context", "workers"), [("fork", 2), ("spawn", 1)])
def test_a_dataloader_with_workers_shuffles_and_batches_the_samples(
    make: Make, context: str, workers: int
) -> None:
    dataset = map_style(make())
    batches = DataLoader(
        dataset, batch_size=7, shuffle=True, num_workers=workers, multiprocessing_context=context
    )
    found = [batch["sample_ids"][:, 0] for batch in batches]
    assert sorted(torch.cat(found).tolist()) == list(range(len(dataset)))


def test_workers_are_forked_safely_while_the_loader_reads_ahead_in_threads(make: Make) -> None:
    loader = make(num_workers=2, prefetch=8)
    batches = iter(loader)
    next(batches)
    under_torch = DataLoader(map_style(loader), batch_size=5, num_workers=2, multiprocessing_context="fork")
    for found in (under_torch, DataLoader(stream(loader, 9), batch_size=None, num_workers=2)):
        assert len([next(batches) and batch for batch in found]) >= 9
    batches.close()


# Streams


@pytest.mark.parametrize(("workers", "context"), [(0, None), (1, "fork"), (3, "fork"), (1, "spawn")])
def test_a_dataloader_serves_the_same_batches_in_order_with_any_workers(
    make: Make, workers: int, context: str | None
) -> None:
    loader = make(deliver="numpy" if context == "fork" else "torch")
    list(islice(loader, 2))
    batches = DataLoader(
        stream(loader, steps=7), batch_size=None, num_workers=workers, multiprocessing_context=context
    )
    found = list(batches)
    assert steps_of(found, 9) == wanted(2, 9)
    for batch, step in zip(found, range(2, 9), strict=True):
        assert torch.equal(batch["input_ids"], torch.as_tensor(loader.batch_at(step)["input_ids"]))
    assert loader.step == 2, "a stream does not move its loader"


def test_the_state_after_batches_of_a_plain_dataloader_resumes_the_loader(make: Make) -> None:
    loader = make()
    list(islice(loader, 2))
    dataset = stream(loader)
    assert steps_of(DataLoader(dataset, batch_size=None), 3) == wanted(2, 5)
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(dataset.state_after(3))))
    assert steps_of(resumed, 2) == wanted(5, 7)
    with pytest.raises(UsageError, match=r"zero or more \(got -1\)"):
        dataset.state_after(-1)


def stateful(loader: Loader, workers: int, **options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(
        stream(loader, options.pop("steps", None)), batch_size=None, num_workers=workers, **options
    )


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_stateful_dataloader_resumes_exactly_with_as_many_workers(
    make: Make, workers: int, taken: int
) -> None:
    first = stateful(make(), workers)
    before = iter(first)
    assert steps_of(before, taken) == wanted(0, taken)
    saved = first.state_dict()
    del before, first
    again = stateful(make(), workers, steps=99)
    again.load_state_dict(saved)
    after = iter(again)
    assert steps_of(after, 5) == wanted(taken, taken + 5)


@pytest.mark.parametrize(("workers", "others", "every"), [(3, 0, 1), (2, 3, 1), (0, 2, 1), (2, 1, 4)])
def test_another_number_of_workers_resumes_exactly_through_the_loader(
    make: Make, workers: int, others: int, every: int
) -> None:
    first = stateful(make(), workers, snapshot_every_n_steps=every)
    before = iter(first)
    assert steps_of(before, 7) == wanted(0, 7)
    saved = first.state_dict()
    del before, first
    loader = make()
    loader.load_state_dict(stream(loader).loader_state(saved))
    assert loader.step == 7
    assert steps_of(iter(stateful(loader, others)), 4) == wanted(7, 11)


def test_a_worker_refuses_the_state_of_another_number_of_workers(make: Make) -> None:
    turns = iter(stream(make()))
    with pytest.raises(StateMismatch, match=r"saved with 2 workers, this one has 1.*loader_state"):
        turns.load_state_dict({**turns.state_dict(), "workers": 2})


def test_a_state_of_something_else_is_refused(make: Make) -> None:
    with pytest.raises(StateMismatch, match=r"contains no stream of this loader.*state_dict"):
        stream(make()).loader_state({"_snapshot": [{"worker_0": 1}]})


# Steps


def test_steps_end_at_a_step_of_the_run_and_say_its_length(make: Make) -> None:
    steps = SizedBatches(make(), 5)
    assert len(steps) == 5
    assert steps_of(iter(steps), 3) == wanted(0, 3)
    again = SizedBatches(make(), 5)
    again.load_state_dict(json.loads(json.dumps(steps.state_dict())))
    assert steps_of(iter(again), 9) == wanted(3, 5)
    assert list(again) == []
    with pytest.raises(ConfigError, match=r"steps must be at least 1 \(got 0\)"):
        SizedBatches(make(), 0)
