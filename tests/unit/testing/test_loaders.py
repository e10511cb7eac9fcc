"""The conformance kit passes what is sound and fails what is broken, each way in its own words."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.testing.corpora import numbered_corpus
from penstock.testing.loader_adapters import PenstockAdapter, StatefulAdapter
from penstock.testing.loaders import (
    LoaderAdapter,
    assert_bounded_state,
    assert_exactly_once,
    assert_rescalable,
    assert_resumable,
)

ROWS = 60
TOKENS = np.arange(ROWS * 4) + 1


class Rows:
    """A sound loader of rows of four tokens, which subclasses break: rank r takes rows r, r + ranks, ..."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.step = rank, world_size, 0
        self.first = 0

    def row(self, row: int) -> list[int]:
        return list(range(4 * row + 1, 4 * row + 5))

    def __iter__(self) -> Iterator[list[int]]:
        while (row := self.first + self.step * self.world_size + self.rank) < ROWS:
            self.step += 1
            yield self.row(row)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.first + self.step * self.world_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["rows"]


class LosesOne(Rows):
    def row(self, row: int) -> list[int]:
        return [token for token in super().row(row) if token != 77]


class RepeatsOne(Rows):
    def row(self, row: int) -> list[int]:
        return super().row(row) if row != 9 else [*super().row(row), 5]


class ServesForeign(Rows):
    def row(self, row: int) -> list[int]:
        return super().row(row) if row != 9 else [*super().row(row), 9999]


class NeverEnds(Rows):
    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [1, 2, 3, 4]


class ForgetsItsBuffer(Rows):
    """Reads three rows ahead and saves how far it has read, not how far it has served."""

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.first + (self.step + 3 * (self.step > 0)) * self.world_size}


class StartsAgain(Rows):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class IsDisturbedBySaving(Rows):
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        self.step += 1
        return state


class CountsForItsRanksOnly(Rows):
    """Resumes exactly on as many ranks, and on no other number."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["step"] * self.world_size


class SavesAllItServed(Rows):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "served": list(range(100 * self.step))}


class SavesItsReservoir(Rows):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "reservoir": bytes(100_000)}


class SavesItself(Rows):
    """Its state is a live object, which moves on after it was saved."""

    def state_dict(self) -> Any:
        self.alive = getattr(self, "alive", {})
        self.alive["rows"] = super().state_dict()["rows"]
        return self.alive


def adapter(kind: type[Rows]) -> LoaderAdapter:
    return StatefulAdapter(lambda rank, world_size, _workers: kind(rank, world_size), lambda batch: batch)


def all_of(broken: type[Rows]) -> None:
    assert_exactly_once(adapter(broken), TOKENS, world_size=2)
    assert_resumable(adapter(broken), world_size=2)
    assert_rescalable(adapter(broken), TOKENS)
    assert_bounded_state(adapter(broken), batches=20)


@pytest.mark.parametrize("sound", [Rows, SavesItself])
def test_a_sound_loader_passes(sound: type[Rows]) -> None:
    all_of(sound)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (LosesOne, "In one pass on 2 ranks with 0 workers each: 1 tokens lost and 0 repeated, of 240."),
        (RepeatsOne, "In one pass on 2 ranks with 0 workers each: 0 tokens lost and 1 repeated, of 240."),
        (ServesForeign, "0 repeated, and 1 served that were not expected, of 240."),
        (NeverEnds, "The pass has not ended after 488 tokens, twice the corpus."),
        (
            ForgetsItsBuffer,
            "After saving at batch 1 and opening again: 24 tokens lost and 0 repeated, and 24 served that "
            "were not expected in the next 8 batches; the first wrong one is batch 0 of rank 0",
        ),
        (StartsAgain, "After saving at batch 1 and opening again: 8 tokens lost and 0 repeated"),
        (IsDisturbedBySaving, "After saving at batch 0 and resuming: 8 tokens lost"),
        (
            CountsForItsRanksOnly,
            "In one pass on 4 -> 2 -> 3 -> 1 ranks, 2 batches before each change: 0 tokens lost and 64 "
            "repeated, of 240.",
        ),
        (SavesItsReservoir, "The state of a rank has 100,"),
        (SavesAllItServed, "bytes over 20 batches."),
    ],
)
def test_a_broken_loader_fails_with_what_was_lost_and_repeated(broken: type[Rows], message: str) -> None:
    with pytest.raises(AssertionError) as caught:
        all_of(broken)
    assert message in str(caught.value)


def test_a_loader_that_serves_nothing_has_no_state_to_judge() -> None:
    class Empty(Rows):
        def __iter__(self) -> Iterator[list[int]]:
            return iter(())

    with pytest.raises(AssertionError, match="serves nothing"):
        assert_bounded_state(adapter(Empty))


def test_a_failed_check_closes_every_loader() -> None:
    open_now = []

    class Counting(StatefulAdapter):
        def open(
            self, rank: int, world_size: int, num_workers: int, states: Sequence[Any] | None = None
        ) -> Any:
            if len(open_now) == 2:
                raise OSError("the third cannot be opened")
            open_now.append(super().open(rank, world_size, num_workers, states))
            return open_now[-1]

        def close(self, opened: Any) -> None:
            super().close(opened)
            open_now.remove(opened)

    counting = Counting(lambda rank, world_size, _workers: Rows(rank, world_size), lambda batch: batch)
    with pytest.raises(OSError, match="third"):
        assert_exactly_once(counting, TOKENS, world_size=3)
    assert open_now == []


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_penstocks_loader_keeps_all_four_promises(tmp_path: Path, num_workers: int, packing: str) -> None:
    lengths = [1 + (7 * i) % 43 for i in range(60)]
    corpus = numbered_corpus(tmp_path / "web", lengths)
    expected = np.arange(sum(lengths)) + 1
    ours = PenstockAdapter({"web": corpus}, sequence_length=16, global_batch_size=12, packing=packing)
    assert_exactly_once(ours, expected, world_size=3, num_workers=num_workers)
    assert_resumable(ours, world_size=2, num_workers=num_workers, at=(0, 1, 3), batches=4)
    assert_rescalable(ours, expected, world_sizes=(4, 12, 3, 1), num_workers=(0, num_workers), batches=1)
    assert_bounded_state(ours, num_workers=num_workers, batches=12, limit_bytes=4096)
