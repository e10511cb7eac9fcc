"""Epoch schedule of a corpus: its entries after growth, streaming and changes of length."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.data.corpus.open import open_corpus
from penstock.data.order.epochs import CorpusEpochs, FullEpochs, OrderConfig, RemainderEpoch, begin
from penstock.testing.corpora import numbered_corpus
from tests.growing import finish, grow, streamed_corpus

EPOCH = 10  # rows of the first part


def plan(*, streamed: bool = False) -> OrderConfig:
    return OrderConfig(
        name="c", seed=0, sequence_length=8, longest=8, split="train", holdout=0.0, packing="concat",
        streamed=streamed, base_parts=0 if streamed else 1,
    )  # fmt: skip


def described(epochs: CorpusEpochs) -> list[tuple[str, int, int | None, int]]:
    """Return kind, first epoch, number of epochs and tokens of each entry."""
    return [
        (type(entry).__name__, entry.first, entry.epochs, entry.space.num_tokens)
        for entry in epochs.entries
        if isinstance(entry, FullEpochs | RemainderEpoch)
    ]


@pytest.fixture
def grown(tmp_path: Path) -> Path:
    folder = numbered_corpus(tmp_path / "c", [8] * EPOCH)
    grow(folder, [8] * 5)
    grow(folder, [8] * 2)
    return folder


@pytest.mark.parametrize(
    ("samples", "entries"),
    [
        (0, [("FullEpochs", 0, None, 120)]),
        (1, [("FullEpochs", 0, 1, 80), ("FullEpochs", 0, 1, 40), ("FullEpochs", 1, None, 120)]),
        (EPOCH, [("FullEpochs", 0, 1, 80), ("FullEpochs", 0, 1, 40), ("FullEpochs", 1, None, 120)]),
        (EPOCH + 1, [("FullEpochs", 0, 2, 80), ("FullEpochs", 0, 1, 40), ("FullEpochs", 2, None, 120)]),
    ],
)
def test_a_new_part_is_read_when_the_epoch_in_progress_ends(
    grown: Path, samples: int, entries: list[tuple[str, int, int | None, int]]
) -> None:
    corpus = open_corpus(grown)
    epochs = begin(plan(), corpus).grown(samples, corpus, 2)
    assert described(epochs) == entries
    assert epochs.grown(samples, corpus, 2) is epochs


def test_a_second_growth_before_the_first_was_read_follows_it(grown: Path) -> None:
    corpus = open_corpus(grown)
    epochs = begin(plan(), corpus).grown(3, corpus, 2).grown(5, corpus, 3)
    assert described(epochs) == [
        ("FullEpochs", 0, 1, 80), ("FullEpochs", 0, 1, 40),
        ("FullEpochs", 0, 1, 16), ("FullEpochs", 1, None, 136),
    ]  # fmt: skip
    assert epochs.max_samples(1) == 10 + 5 + 2
    assert epochs.max_samples(2) == 17 + 17


def test_a_change_of_length_leaves_a_rest_and_what_was_to_come(grown: Path) -> None:
    corpus = open_corpus(grown)
    epochs = begin(plan(), corpus).grown(3, corpus, 2).at_length(4, 16)
    assert described(epochs) == [
        ("RemainderEpoch", 0, 1, 80),
        ("FullEpochs", 0, 1, 40),
        ("FullEpochs", 1, None, 120),
    ]
    assert epochs.firsts == [0, 3, 6]
    assert described(epochs.at_length(3, 4)) == [
        ("FullEpochs", 0, 1, 40),
        ("FullEpochs", 1, None, 120),
    ]


def test_a_streamed_schedule_is_its_parts_and_then_the_whole(tmp_path: Path) -> None:
    folder = streamed_corpus(tmp_path / "s", [8] * EPOCH)
    grow(folder, [8] * 5)
    finish(folder)
    corpus = open_corpus(folder)
    epochs = begin(plan(streamed=True), corpus).streamed(corpus, 2)
    assert (described(epochs), epochs.ends, epochs.max_samples(1)) == (
        [("FullEpochs", 0, 1, 80), ("FullEpochs", 0, 1, 40)],
        15,
        None,
    )
    assert described(epochs.finished(corpus))[-1] == ("FullEpochs", 1, None, 120)
    assert epochs.finished(corpus).max_samples(1) == 15
    assert [epochs.parts_begun(taken) for taken in (0, 1, 10, 11)] == [0, 1, 1, 2]
    later = epochs.at_length(4, 16)
    assert [later.parts_begun(taken) for taken in (0, 3, 4)] == [1, 1, 2], "whatever was seen when it changed"


def test_a_part_that_a_split_has_nothing_of_is_passed_over(tmp_path: Path) -> None:
    folder = streamed_corpus(tmp_path / "s", [100] * 20)
    grow(folder, [1])
    grow(folder, [100] * 20)
    corpus = open_corpus(folder)
    heldout = replace(plan(streamed=True), split="heldout", holdout=0.5)
    epochs = begin(heldout, corpus).streamed(corpus, 3)
    assert (len(epochs.entries), epochs.parts) == (2, 3)
    assert epochs.parts_begun(epochs.firsts[1] + 1) == 3
