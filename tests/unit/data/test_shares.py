"""Rows located for several steps at once are those of each step by itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import UsageError
from penstock.data import Loader
from penstock.data.reader import shares_from
from penstock.data.schedule.change_log import ChangeLog
from penstock.data.types import MAX_SAMPLES
from penstock.testing.corpora import numbered_corpus

MIX = {"web": 3, "code": 1}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("corpora")
    return {name: numbered_corpus(folder / name, [(7 * i) % 31 for i in range(90)]) for name in MIX}


def loader(corpora: dict[str, Path], **options: Any) -> Loader:
    plain = {"sequence_length": 8, "global_batch_size": 12, "num_workers": 0, "deliver": "numpy"}
    return Loader(corpora, **{"weights": MIX, **plain, **options})


@pytest.mark.parametrize("world_size", [1, 3])
def test_steps_that_are_located_together_are_what_each_is_alone(
    corpora: dict[str, Path], world_size: int
) -> None:
    sample_index = loader(corpora)._run.sample_index
    together = shares_from(sample_index, 2, world_size=world_size)
    assert len(together.steps) == 2048 // 12
    for step in together.steps:
        apart = shares_from(sample_index, step, world_size=world_size)
        for rank in range(world_size):
            found, alone = (one.of(step, rank=rank, world_size=world_size) for one in (together, apart))
            for name in ("samples", "corpus", "addresses", "at_home"):
                assert np.array_equal(getattr(found, name), getattr(alone, name))


def test_what_is_located_together_ends_where_something_changes(corpora: dict[str, Path]) -> None:
    changed = loader(corpora)
    changed.set_weights({"web": 1, "code": 1}, step=9)
    assert shares_from(changed._run.sample_index, 4, world_size=1).steps == range(4, 9)
    change_log = ChangeLog(batch=((0, 4), (6, 2)), length=((0, 8), (11, 16)), mix=((0, {"web": 1}, ""),))
    assert change_log.steps_alike(0, most=100) == range(6)
    assert change_log.steps_alike(6, most=100) == range(6, 11)
    assert change_log.steps_alike(11, most=3) == range(11, 14)


@pytest.mark.parametrize("step", [0, 3])
def test_what_was_located_ahead_is_dropped_by_every_change(corpora: dict[str, Path], step: int) -> None:
    def told(one: Loader, change: str) -> None:
        first = int(one.samples_of(step)[0])
        match change:
            case "weights":
                one.set_weights({"web": 1, "code": 2})
            case "skip":
                one.skip(samples=range(first, first + 7))
            case "batch":
                one.set_global_batch_size(6)
            case "length":
                one.set_sequence_length(16)
            case "removal":
                one.remove_corpus("code")

    for change in ("weights", "skip", "batch", "length", "removal"):
        ahead, fresh = loader(corpora), loader(corpora)
        batches = iter(ahead)
        for _ in range(step):
            next(batches)
        ahead.batch_at(step)  # its share is located, and that of later steps
        fresh.load_state_dict(ahead.state_dict())
        told(ahead, change)
        told(fresh, change)
        for later in range(step, step + 4):
            one, other = ahead.batch_at(later), fresh.batch_at(later)
            assert all(np.array_equal(one[name], other[name]) for name in other), change


def test_the_ids_of_a_batch_may_be_written_to(corpora: dict[str, Path]) -> None:
    one = loader(corpora)
    one.batch_at(0)["sample_ids"][:] = -1
    assert sorted(one.batch_at(0)["sample_ids"].tolist()) == list(range(12))


def test_the_last_steps_that_can_be_counted_are_located_and_no_more(corpora: dict[str, Path]) -> None:
    one = loader(corpora)
    last = MAX_SAMPLES // 12 - 1
    assert len(one._run.change_log.steps_alike(last - 1, most=100)) == 2
    assert len(one.batch_at(last)["sample_ids"]) == 12
    with pytest.raises(UsageError, match=r"within 2\^62 samples"):
        one.batch_at(last + 1)


def pairs(batch: dict[str, np.ndarray]) -> int:
    """Return the attention pairs of a batch."""
    lengths = np.diff(batch["cu_seqlens"].astype(np.int64))
    return int((lengths * (lengths + 1) // 2).sum())


@pytest.fixture(scope="module")
def short_and_long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, rng = tmp_path_factory.mktemp("short-and-long"), np.random.default_rng(0)
    lengths = {
        "short": np.maximum(1, rng.lognormal(1.5, 0.6, 15_000)).astype(int),
        "long": np.maximum(1, rng.lognormal(5.5, 0.8, 150)).astype(int),
    }
    return {name: numbered_corpus(folder / name, of.tolist()) for name, of in lengths.items()}


@pytest.mark.parametrize(("ranks", "rows"), [(8, 16), (3, 24)])
def test_no_rank_has_more_than_a_tenth_above_the_mean_of_attention_pairs(
    short_and_long: dict[str, Path], ranks: int, rows: int
) -> None:
    loads = []
    for rank in range(ranks):
        made = loader(
            short_and_long,
            weights={"short": 7, "long": 3},
            sequence_length=64,
            global_batch_size=ranks * rows,
            rank=rank,
            world_size=ranks,
            fields=("cu_seqlens", "labels"),
        )
        loads.append([pairs(made.batch_at(step)) for step in range(5)])
    by_step = np.array(loads)
    assert (by_step.max(axis=0) <= 1.1 * by_step.mean(axis=0)).all()


def test_costly_rows_share_a_micro_batch_on_all_ranks(short_and_long: dict[str, Path]) -> None:
    for rank in range(4):
        made = loader(
            {"long": short_and_long["long"]},
            weights=None,
            sequence_length=64,
            global_batch_size=32,
            rank=rank,
            world_size=4,
            micro_batch_size=2,
            fields=("input_ids", "cu_seqlens"),
        )
        ends = made.batch_at(1)["cu_seqlens"].astype(np.int64)
        parts = [ends[(ends >= first) & (ends <= first + 128)] for first in range(0, 8 * 64, 128)]
        costs = [pairs({"cu_seqlens": part}) for part in parts]
        assert costs == sorted(costs, reverse=True)


def test_attention_pairs_are_those_of_the_documents_that_are_served(corpora: dict[str, Path]) -> None:
    for packing in ("concat", "best_fit"):
        one = loader(corpora, fields=("input_ids", "cu_seqlens"), global_batch_size=1, packing=packing)
        sample_index = one._run.sample_index
        for step in range(200):
            chosen = shares_from(sample_index, step, world_size=1).of(step, rank=0, world_size=1)
            told = sample_index.attention_pairs(chosen.corpus, chosen.phase, chosen.addresses)
            assert told.tolist() == [pairs(one.batch_at(step))]
