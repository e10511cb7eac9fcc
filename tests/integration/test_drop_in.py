"""The loader in others' hands: transforms, torch's loaders under the kit, the comparison."""

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import BaseDataLoader

from penstock.core.errors import TransformError
from penstock.data import Loader
from penstock.data.torch_dataset import stream
from penstock.data.transform import Sample
from penstock.data.transforms import FillInTheMiddle
from penstock.testing.corpora import numbered_corpus
from penstock.testing.loader_adapters import StatefulAdapter
from penstock.testing.loaders import assert_bounded_state, assert_resumable

ROOT = Path(__file__).parent.parent.parent
FIM = FillInTheMiddle(prefix_id=90_001, middle_id=90_002, suffix_id=90_003, rate=0.8)

# torchdata 0.11 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def fails_at_nine(sample: Sample, _rng: np.random.Generator) -> Sample:
    if sample.sample_id == 9:
        raise KeyError("no such language")
    return sample


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = [1 + (7 * i) % 43 for i in range(120)]
    return numbered_corpus(tmp_path_factory.mktemp("corpora") / "web", lengths)


@pytest.fixture
def make(corpus: Path) -> Callable[..., Loader]:
    def made(**options: Any) -> Loader:
        plain = {"sequence_length": 32, "global_batch_size": 4, "num_workers": 0, "transform": FIM}
        return Loader({"web": corpus}, **{**plain, **options})

    return made


def rows(loader: Loader, steps: int) -> dict[int, tuple[list[int], list[int]]]:
    """Sample id -> (input_ids, labels) of the next steps."""
    batches = iter(loader)
    found = {}
    for batch in islice(batches, steps):
        columns = (batch[name].tolist() for name in ("sample_ids", "input_ids", "labels"))
        found.update({sample: (ids, labels) for sample, ids, labels in zip(*columns, strict=True)})
    batches.close()
    return found


# Transforms in the loader


def test_transformed_samples_do_not_depend_on_threads_ranks_batches_or_resumes(
    make: Callable[..., Loader],
) -> None:
    alone = rows(make(), 9)
    assert len(alone) == 36
    assert sum(90_001 in ids for ids, _ in alone.values()) > 18, "most rows were rearranged"
    assert rows(make(num_workers=2), 9) == alone
    assert rows(make(global_batch_size=12), 3) == alone

    loader = make(fields=("input_ids", "labels", "cu_seqlens"))
    first = rows(loader, 3)
    ranks = [make(num_workers=r, rank=r, world_size=3, global_batch_size=6) for r in range(3)]
    for rank in ranks:
        rank.load_state_dict(json.loads(json.dumps(loader.state_dict())), on_change="apply")
    assert first | {k: v for rank in ranks for k, v in rows(rank, 4).items()} == alone


def test_single_samples_are_transformed_alike(make: Callable[..., Loader]) -> None:
    sample = make().dataset[7]
    assert (sample["input_ids"].tolist(), sample["labels"].tolist()) == rows(make(), 2)[7]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_failing_transform_is_named_with_its_sample_at_its_step(
    make: Callable[..., Loader], num_workers: int
) -> None:
    loader = make(transform=fails_at_nine, num_workers=num_workers)
    assert sorted(rows(loader, 2)) == list(range(8))
    with pytest.raises(TransformError) as caught:
        rows(loader, 1)
    message = "Transform 'fails_at_nine' of sample 9 failed with KeyError: 'no such language'."
    assert str(caught.value) == message
    assert loader.step == 2


def test_a_heavy_transform_runs_in_the_processes_of_a_dataloader(make: Callable[..., Loader]) -> None:
    batches = DataLoader(stream(make(), steps=9), batch_size=None, num_workers=2)
    found = {
        sample: (ids, labels)
        for batch in batches
        for sample, ids, labels in zip(
            *(batch[name].tolist() for name in ("sample_ids", "input_ids", "labels")), strict=True
        )
    }
    assert found == rows(make(), 9)


# The conformance kit on what others hand our batches through


def test_a_stateful_dataloader_over_our_stream_keeps_its_promises(make: Callable[..., Loader]) -> None:
    def opened(rank: int, world_size: int, num_workers: int) -> StatefulDataLoader:
        loader = make(rank=rank, world_size=world_size)
        return StatefulDataLoader(stream(loader, steps=20), batch_size=None, num_workers=num_workers)

    adapter = StatefulAdapter(opened, lambda batch: batch["input_ids"])
    assert_resumable(adapter, world_size=2, num_workers=2, at=(0, 3), batches=4)
    assert_bounded_state(adapter, num_workers=1, batches=10, limit_bytes=8192)


# Checkpoints of torch.distributed


def test_the_state_goes_through_a_torch_checkpoint_as_it_is(
    make: Callable[..., Loader], tmp_path: Path
) -> None:
    loader = make()
    rows(loader, 3)
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    again = make()
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert rows(again, 2) == rows(loader, 2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchtitan_builds_and_saves_our_loader_as_one_of_its_own(corpus: Path, tmp_path: Path) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "05-torchtitan.py"))
    one, other = (example["open_ranks"](str(corpus), world_size=1)[0] for _ in range(2))
    assert isinstance(one, BaseDataLoader)
    assert type(one).__module__ != BaseDataLoader.__module__
    inputs, labels = next(iter(one))
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (8, 32)
    dcp.save({"dataloader": one}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"dataloader": other}, checkpoint_id=tmp_path, no_dist=True)
    assert other.loader.step == 1
    assert example["rows"]([other], 2) == example["rows"]([one], 2)


# The comparison


def test_the_comparison_runs_and_penstock_keeps_every_promise(tmp_path: Path) -> None:
    program = [sys.executable, ROOT / "benchmarks" / "conformance.py", "--out", tmp_path]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("conformance-*.json")
    loaders = json.loads(path.read_text())["loaders"]
    assert len(loaders) == 3
    ours = loaders["penstock"]
    assert ours.pop("state_bytes") < 4096
    assert set(ours.values()) == {"kept"}
