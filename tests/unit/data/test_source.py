"""One corpus as rows by place: packed once, shared by threads, ended by its cap, awaited while it grows."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.growing import grow, streamed_corpus

from penstock.core.errors import CorpusError, CorpusExhausted
from penstock.data.source import Source
from penstock.data.way import Plan, Way, begin
from penstock.testing.corpora import numbered_corpus

TOKENS = 6000
LENGTH = 2  # pools of 512 tokens: 12 pools, 2 lanes


def plan(*, length: int = LENGTH, streamed: bool = False) -> Plan:
    return Plan(
        name="web",
        seed=0,
        sequence_length=length,
        longest=length,
        split="train",
        holdout=0.0,
        streamed=streamed,
        base_parts=0 if streamed else 1,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return numbered_corpus(tmp_path_factory.mktemp("c"), [10] * (TOKENS // 10))


def opened(folder: Path, *, max_epochs: int | None = None) -> tuple[Source, Way]:
    source = Source("web", folder, rule="best_fit", max_epochs=max_epochs)
    return source, begin(plan(), source.corpus)


def places(way: Way, samples: np.ndarray) -> np.ndarray:
    found = way.legs[0].locate(samples)
    return np.stack((np.zeros_like(samples), found.epoch, found.pool, found.row), axis=1)


def tables(source: Source, way: Way, samples: np.ndarray) -> list[list[list[int]]]:
    return [table.tolist() for table in source.rows(way, places(way, samples))]


def test_rows_do_not_depend_on_the_order_they_are_read_in(folder: Path) -> None:
    samples = np.arange(0, 2 * TOKENS // LENGTH, 13)
    forward = tables(*opened(folder), samples)
    backward = tables(*opened(folder), samples[::-1])
    shuffled = np.arange(len(samples)) * 97 % len(samples)
    assert backward[::-1] == forward
    assert tables(*opened(folder), samples[shuffled]) == [forward[i] for i in shuffled.tolist()]


def test_a_pool_is_packed_once_while_its_lane_is_at_it(folder: Path) -> None:
    source, way = opened(folder)
    at = places(way, np.arange(200))
    first = source.rows(way, at[:2])
    for index in range(2, 200, 2):
        rows = source.rows(way, at[index : index + 2])
        assert all(a.base is b.base for a, b in zip(first, rows, strict=True)), "views of the same table"


def test_ways_of_other_lengths_share_a_source_and_not_its_pools(folder: Path) -> None:
    source, way = opened(folder)
    longer = begin(plan(length=3), source.corpus)
    samples = np.arange(20)
    expected = [tables(*opened(folder), samples), tables(opened(folder)[0], longer, samples)]
    assert [tables(source, way, samples), tables(source, longer, samples)] == expected
    assert tables(source, way, samples) == expected[0]


def test_threads_that_read_the_same_rows_get_the_same_ones(folder: Path) -> None:
    samples = np.arange(0, 2 * TOKENS // LENGTH, 11)
    source, way = opened(folder)
    expected = tables(*opened(folder), samples)
    with ThreadPoolExecutor(6) as workers:
        found = workers.map(lambda _: tables(source, way, samples), range(12))
        assert all(rows == expected for rows in found)


def test_a_capped_corpus_gives_its_epochs_and_then_says_so(folder: Path) -> None:
    source, way = opened(folder, max_epochs=2)
    source.check_supply(way, 5999)
    message = "Corpus 'web' has given all 6,000 sequences of its 2 epochs. Train for fewer steps"
    with pytest.raises(CorpusExhausted, match=message):
        source.check_supply(way, 6000)


def test_a_streamed_corpus_is_awaited_and_its_next_part_found(tmp_path: Path) -> None:
    folder = streamed_corpus(tmp_path / "s", [4] * 10)
    source = Source("web", folder, rule="concat", max_epochs=None)
    way = source.reach(begin(plan(streamed=True), source.corpus), 0)
    assert (way.parts, way.ends) == (1, 20)
    grow(folder, [4] * 5)
    longer = source.reach(way, 20)
    assert (longer.parts, longer.ends) == (2, 30)
    assert (way.parts, way.ends) == (1, 20), "what others hold stays as it was"


def test_a_streamed_corpus_that_gives_nothing_more_in_time_is_an_error(tmp_path: Path) -> None:
    folder = streamed_corpus(tmp_path / "s", [4] * 10)
    source = Source("web", folder, rule="concat", max_epochs=None, wait_seconds=0)
    with pytest.raises(CorpusError, match=r"'web' is being prepared and gave no part in 0 s\. Start its"):
        source.reach(begin(plan(streamed=True), source.corpus), 20)
