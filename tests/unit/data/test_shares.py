"""Rows located for several steps at once are those of each step by itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import UsageError
from penstock.data import Loader
from penstock.data.shares import shares_from
from penstock.data.timeline import MOST_SAMPLES, Timeline
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
    course = loader(corpora)._run.course
    for rank in range(world_size):
        together = shares_from(course, 2, rank=rank, world_size=world_size)
        assert len(together.steps) == 2048 // 12
        for step in together.steps:
            alone = shares_from(course, step, rank=rank, world_size=world_size).of(step)
            found = together.of(step)
            for name in ("samples", "corpus", "places"):
                assert np.array_equal(getattr(found, name), getattr(alone, name))


def test_what_is_located_together_ends_where_something_changes(corpora: dict[str, Path]) -> None:
    changed = loader(corpora)
    changed.set_weights({"web": 1, "code": 1}, step=9)
    assert shares_from(changed._run.course, 4, rank=0, world_size=1).steps == range(4, 9)
    timeline = Timeline(batch=((0, 4), (6, 2)), length=((0, 8), (11, 16)), mix=((0, {"web": 1}, ""),))
    assert timeline.steps_alike(0, most=100) == range(6)
    assert timeline.steps_alike(6, most=100) == range(6, 11)
    assert timeline.steps_alike(11, most=3) == range(11, 14)


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
    last = MOST_SAMPLES // 12 - 1
    assert len(one._run.timeline.steps_alike(last - 1, most=100)) == 2
    assert len(one.batch_at(last)["sample_ids"]) == 12
    with pytest.raises(UsageError, match=r"within 2\^62 samples"):
        one.batch_at(last + 1)
