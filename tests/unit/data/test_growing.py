"""Corpora that grow: what is served does not depend on when a part came, on ranks, or on stops."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.core import clock
from penstock.core.arrays import Int64
from penstock.core.errors import ConfigError, CorpusChanged
from penstock.data import Loader
from penstock.testing.corpora import numbered_corpus
from tests.growing import finish, grow, streamed_corpus

LENGTH, BATCH = 8, 4
PARTS = [[3, 9, 0, 20], [40, 1, 1, 7, 30], [5] * 30, [64, 2]]
TOKENS = sum(map(sum, PARTS))


def finished_corpus(folder: Path) -> Path:
    streamed_corpus(folder, PARTS[0])
    for part in PARTS[1:]:
        grow(folder, part)
    finish(folder)
    return folder


@pytest.fixture
def growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A function that begins a corpus, which grows by a part whenever somebody waits for it."""

    def begun(name: str) -> Path:
        folder = streamed_corpus(tmp_path / name, PARTS[0])

        def events() -> Iterator[None]:
            for part in PARTS[1:]:
                yield grow(folder, part)
            yield finish(folder)

        left = events()
        monkeypatch.setattr(clock, "sleep", lambda _seconds: next(left))
        return folder

    return begun


def loader(folder: Path, *, rank: int = 0, world_size: int = 1, **options: object) -> Loader:
    given = {"sequence_length": LENGTH, "global_batch_size": BATCH, "deliver": "numpy", "num_workers": 0}
    return Loader({"web": folder}, rank=rank, world_size=world_size, **{**given, **options})  # type: ignore[arg-type]


def served(folder: Path, steps: range, *, world_size: int = 1, state: object = None) -> dict[int, bytes]:
    """Return the rows of steps by sample id, from all ranks."""
    rows = {}
    for rank in range(world_size):
        reader = loader(folder, rank=rank, world_size=world_size)
        if state is not None:
            reader.load_state_dict(state)  # type: ignore[arg-type]
        for step in steps:
            batch = reader.batch_at(step)
            rows.update(
                {
                    i: row.tobytes()
                    for i, row in zip(batch["sample_ids"].tolist(), batch["input_ids"], strict=True)
                }
            )
    return rows


STEPS = range(2 * TOKENS // LENGTH // BATCH)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_what_is_served_while_a_corpus_grows_is_what_the_finished_one_gives(
    growing: Callable[[str], Path], tmp_path: Path, world_size: int
) -> None:
    expected = served(finished_corpus(tmp_path / "whole"), STEPS)
    assert served(growing("web"), STEPS, world_size=world_size) == expected


@pytest.mark.parametrize("stop", range(0, len(STEPS), 3))
def test_a_stop_while_a_corpus_grows_and_a_resume_on_other_ranks_change_nothing(
    growing: Callable[[str], Path], tmp_path: Path, stop: int
) -> None:
    whole = finished_corpus(tmp_path / "whole")
    folder = growing("web")
    first = loader(folder)
    batches = iter(first)
    for _ in range(stop):
        next(batches)
    state = first.state_dict()
    complete = loader(whole)
    complete_batches = iter(complete)
    for _ in range(stop):
        next(complete_batches)
    assert state == complete.state_dict(), "it does not tell how far the preparation had come"
    rest = range(stop, len(STEPS))
    assert served(folder, rest, world_size=2, state=state) == served(whole, rest)


def test_a_corpus_that_is_prepared_anew_is_awaited_on_a_resume(
    growing: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = loader(finished_corpus(tmp_path / "whole"))
    batches = iter(whole)
    for _ in range(len(STEPS) // 2 - 1):
        next(batches)
    again = loader(growing("web"))
    again.load_state_dict(whole.state_dict())
    assert again.batch_at(again.step)["input_ids"].tolist() == next(batches)["input_ids"].tolist()


def tokens_of(reader: Loader, samples: range) -> Counter[int]:
    rows: Int64 = reader.gather(np.arange(samples.start, samples.stop))["input_ids"]
    return Counter(token for token in rows.ravel().tolist() if token)


def run_on(reader: Loader, steps: int) -> None:
    batches = iter(reader)
    for _ in range(steps):
        next(batches)


def test_an_appended_part_is_read_once_after_the_epoch_in_progress_and_then_with_the_whole(
    tmp_path: Path,
) -> None:
    folder = numbered_corpus(tmp_path / "web", [16] * 8)  # 4 steps an epoch
    reader = loader(folder, packing="concat")
    run_on(reader, 2)
    grow(folder, [16] * 4)  # 2 steps
    reader.extend_corpus("web")
    old, new = Counter(range(1, 129)), Counter(range(129, 193))
    assert tokens_of(reader, range(16)) == old, "the epoch under way"
    assert tokens_of(reader, range(16, 24)) == new, "by itself"
    assert tokens_of(reader, range(24, 48)) == old + new, "from now on"
    assert tokens_of(reader, range(48, 72)) == old + new


@pytest.mark.parametrize("steps", [0, 3, 10, 30])
def test_a_streamed_corpus_can_be_appended_to_and_is_resumed_exactly(tmp_path: Path, steps: int) -> None:
    folder = finished_corpus(tmp_path / "web")
    reader = loader(folder, packing="concat")
    run_on(reader, steps)
    before = reader.state_dict()
    grow(folder, [11, 5, 48])
    unaware = loader(folder, packing="concat")
    unaware.load_state_dict(before)
    old = reader.batch_at(40)["input_ids"].tolist()
    assert unaware.batch_at(40)["input_ids"].tolist() == old, "a run takes up what is new when it is told"
    reader.extend_corpus("web")
    state = reader.state_dict()
    resumed = loader(folder, packing="concat")
    resumed.load_state_dict(state)
    for step in range(steps, 80):
        assert resumed.batch_at(step)["input_ids"].tolist() == reader.batch_at(step)["input_ids"].tolist()
    everything = Counter(range(1, TOKENS + 64 + 1))
    seen = tokens_of(reader, range(80 * BATCH))
    assert set(seen) == set(everything)


def test_a_new_run_reads_all_that_was_appended_to_a_streamed_corpus(tmp_path: Path) -> None:
    folder = finished_corpus(tmp_path / "web")
    grow(folder, [11, 5, 48])
    reader = loader(folder)
    rows = sum(-(-sum(part) // LENGTH) for part in PARTS) + 8
    assert set(tokens_of(reader, range(rows + 8))) == set(range(1, TOKENS + 64 + 1))
    again = loader(folder)
    again.load_state_dict(reader.state_dict())
    assert again.batch_at(9)["input_ids"].tolist() == reader.batch_at(9)["input_ids"].tolist()


def test_the_rows_of_a_pass_are_those_that_are_known_on_every_rank(tmp_path: Path) -> None:
    growing, whole = streamed_corpus(tmp_path / "web", PARTS[0]), finished_corpus(tmp_path / "whole")
    rows = sum(-(-sum(part) // LENGTH) for part in PARTS)
    assert loader(growing).samples_per_epoch == {"web": 4}
    assert loader(whole).samples_per_epoch == {"web": rows}
    assert loader(growing).first_rows == loader(whole).first_rows == {"web": 4}


def test_a_corpus_that_still_grows_is_not_extended_by_hand(tmp_path: Path) -> None:
    reader = loader(streamed_corpus(tmp_path / "web", PARTS[0]))
    with pytest.raises(ConfigError, match="'web' is extended automatically during its preparation"):
        reader.extend_corpus("web")


def test_a_part_that_was_altered_since_is_an_error(tmp_path: Path) -> None:
    folder = finished_corpus(tmp_path / "web")
    reader = loader(folder)
    run_on(reader, 10)
    other = streamed_corpus(tmp_path / "other", [1, *PARTS[0]])
    finish(other)
    with pytest.raises(CorpusChanged, match="'web' is not the one the state was saved with"):
        loader(other).load_state_dict(reader.state_dict())
