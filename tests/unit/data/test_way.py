"""The way of a corpus: which legs it has after growth, streaming and changes of length."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.growing import finish, grow, streamed_corpus

from penstock.data.legs import Passes, Rest
from penstock.data.opening import open_corpus
from penstock.data.way import Plan, Way, begin
from penstock.testing.corpora import numbered_corpus

EPOCH = 10  # rows of the first part


def plan(*, streamed: bool = False) -> Plan:
    return Plan(
        name="c", seed=0, sequence_length=8, longest=8, split="train", holdout=0.0, streamed=streamed,
        base_parts=0 if streamed else 1,
    )  # fmt: skip


def told(way: Way) -> list[tuple[str, int, int | None, int]]:
    """Return kind, first epoch, number of epochs and tokens of each leg."""
    return [
        (type(leg).__name__, leg.first, leg.epochs, leg.space.num_tokens)
        for leg in way.legs
        if isinstance(leg, Passes | Rest)
    ]


@pytest.fixture
def grown(tmp_path: Path) -> Path:
    folder = numbered_corpus(tmp_path / "c", [8] * EPOCH)
    grow(folder, [8] * 5)
    grow(folder, [8] * 2)
    return folder


@pytest.mark.parametrize(
    ("samples", "legs"),
    [
        (0, [("Passes", 0, None, 120)]),
        (1, [("Passes", 0, 1, 80), ("Passes", 0, 1, 40), ("Passes", 1, None, 120)]),
        (EPOCH, [("Passes", 0, 1, 80), ("Passes", 0, 1, 40), ("Passes", 1, None, 120)]),
        (EPOCH + 1, [("Passes", 0, 2, 80), ("Passes", 0, 1, 40), ("Passes", 2, None, 120)]),
    ],
)
def test_a_new_part_is_read_when_the_epoch_under_way_ends(
    grown: Path, samples: int, legs: list[tuple[str, int, int | None, int]]
) -> None:
    corpus = open_corpus(grown)
    way = begin(plan(), corpus).grown(samples, corpus, 2)
    assert told(way) == legs
    assert way.grown(samples, corpus, 2) is way


def test_a_second_growth_before_the_first_was_read_follows_it(grown: Path) -> None:
    corpus = open_corpus(grown)
    way = begin(plan(), corpus).grown(3, corpus, 2).grown(5, corpus, 3)
    assert told(way) == [
        ("Passes", 0, 1, 80), ("Passes", 0, 1, 40), ("Passes", 0, 1, 16), ("Passes", 1, None, 136)
    ]  # fmt: skip
    assert way.max_samples(1) == 10 + 5 + 2
    assert way.max_samples(2) == 17 + 17


def test_a_change_of_length_leaves_a_rest_and_what_was_to_come(grown: Path) -> None:
    corpus = open_corpus(grown)
    way = begin(plan(), corpus).grown(3, corpus, 2).at_length(4, 16)
    assert told(way) == [("Rest", 0, 1, 80), ("Passes", 0, 1, 40), ("Passes", 1, None, 120)]
    assert way.firsts == [0, 3, 6]
    assert told(way.at_length(3, 4)) == [("Passes", 0, 1, 40), ("Passes", 1, None, 120)]


def test_a_streamed_way_is_its_parts_and_then_the_whole(tmp_path: Path) -> None:
    folder = streamed_corpus(tmp_path / "s", [8] * EPOCH)
    grow(folder, [8] * 5)
    finish(folder)
    corpus = open_corpus(folder)
    way = begin(plan(streamed=True), corpus).streamed(corpus, 2)
    assert (told(way), way.ends, way.max_samples(1)) == (
        [("Passes", 0, 1, 80), ("Passes", 0, 1, 40)],
        15,
        None,
    )
    assert told(way.finished(corpus))[-1] == ("Passes", 1, None, 120)
    assert way.finished(corpus).max_samples(1) == 15
    assert [way.parts_begun(taken) for taken in (0, 1, 10, 11)] == [0, 1, 1, 2]
    later = way.at_length(4, 16)
    assert [later.parts_begun(taken) for taken in (0, 3, 4)] == [1, 1, 2], "whatever was seen when it changed"


def test_a_part_that_a_split_has_nothing_of_is_passed_over(tmp_path: Path) -> None:
    folder = streamed_corpus(tmp_path / "s", [100] * 20)
    grow(folder, [1])
    grow(folder, [100] * 20)
    corpus = open_corpus(folder)
    heldout = replace(plan(streamed=True), split="heldout", holdout=0.5)
    way = begin(heldout, corpus).streamed(corpus, 3)
    assert (len(way.legs), way.parts) == (2, 3)
    assert way.parts_begun(way.firsts[1] + 1) == 3
