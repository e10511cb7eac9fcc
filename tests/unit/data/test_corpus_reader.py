"""One corpus as rows by place: packed once, shared by threads, ended by its cap, awaited while it grows."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import CorpusError, CorpusExhausted
from penstock.data.corpus_reader import CorpusReader
from penstock.data.order.epochs import CorpusEpochs, OrderConfig, begin
from penstock.testing.corpora import numbered_corpus
from tests.growing import grow, streamed_corpus

TOKENS = 6000
LENGTH = 2  # pools of 512 tokens: 12 pools, 2 lanes


def plan(*, length: int = LENGTH, streamed: bool = False) -> OrderConfig:
    return OrderConfig(
        name="web",
        seed=0,
        sequence_length=length,
        longest=length,
        split="train",
        holdout=0.0,
        packing="concat",
        streamed=streamed,
        base_parts=0 if streamed else 1,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return numbered_corpus(tmp_path_factory.mktemp("c"), [10] * (TOKENS // 10))


def opened(folder: Path, *, max_epochs: int | None = None) -> tuple[CorpusReader, CorpusEpochs]:
    source = CorpusReader("web", folder, rule="best_fit", max_epochs=max_epochs)
    return source, begin(plan(), source.corpus)


def addresses(epochs: CorpusEpochs, samples: np.ndarray) -> np.ndarray:
    found = epochs.entries[0].locate(samples)
    return np.stack((np.zeros_like(samples), found.epoch, found.pool, found.row), axis=1)


def tables(source: CorpusReader, epochs: CorpusEpochs, samples: np.ndarray) -> list[list[list[int]]]:
    return [table.tolist() for table in source.rows(epochs, addresses(epochs, samples))]


def test_rows_do_not_depend_on_the_order_they_are_read_in(folder: Path) -> None:
    samples = np.arange(0, 2 * TOKENS // LENGTH, 13)
    forward = tables(*opened(folder), samples)
    backward = tables(*opened(folder), samples[::-1])
    shuffled = np.arange(len(samples)) * 97 % len(samples)
    assert backward[::-1] == forward
    assert tables(*opened(folder), samples[shuffled]) == [forward[i] for i in shuffled.tolist()]


def test_a_pool_is_packed_once_while_its_lane_is_at_it(folder: Path) -> None:
    source, epochs = opened(folder)
    at = addresses(epochs, np.arange(200))
    first = source.rows(epochs, at[:2])
    for index in range(2, 200, 2):
        rows = source.rows(epochs, at[index : index + 2])
        assert all(a.base is b.base for a, b in zip(first, rows, strict=True)), "views of the same table"


def test_schedules_of_other_lengths_share_a_source_and_not_its_pools(folder: Path) -> None:
    source, epochs = opened(folder)
    longer = begin(plan(length=3), source.corpus)
    samples = np.arange(20)
    expected = [tables(*opened(folder), samples), tables(opened(folder)[0], longer, samples)]
    assert [tables(source, epochs, samples), tables(source, longer, samples)] == expected
    assert tables(source, epochs, samples) == expected[0]


def test_threads_that_read_the_same_rows_get_the_same_ones(folder: Path) -> None:
    samples = np.arange(0, 2 * TOKENS // LENGTH, 11)
    source, epochs = opened(folder)
    expected = tables(*opened(folder), samples)
    with ThreadPoolExecutor(6) as workers:
        found = workers.map(lambda _: tables(source, epochs, samples), range(12))
        assert all(rows == expected for rows in found)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_of_lanes_of_other_ranks_only_what_rows_cost_is_kept(tmp_path: Path, ranks: int) -> None:
    folder = numbered_corpus(tmp_path / "c", [1 + i % 7 for i in range(40_000)])
    source = CorpusReader("web", folder, rule="best_fit", max_epochs=None, ranks=ranks)
    epochs = begin(plan(), source.corpus)
    lanes = epochs.entries[0].order.geometry.lanes
    assert lanes > 60
    alone = CorpusReader("web", folder, rule="best_fit", max_epochs=None)
    for first in range(0, 20 * lanes, 2 * lanes):
        at = addresses(epochs, np.arange(first, first + 2 * lanes))
        at_home = at[:, 2] % lanes % ranks == 0
        described = source.attention_pairs(epochs, at, at_home=at_home)
        assert described.tolist() == alone.attention_pairs(epochs, at).tolist()
        assert len(source._pools) == -(-lanes // ranks), "those of its own lanes"
    kept = dict(source._pools)
    for row in at[~at_home]:  # rows that were swapped: their pools are packed again, and dropped again
        source.rows(epochs, row[None], at_home=np.zeros(1, np.bool_))
        source.rows(epochs, at[at_home], at_home=np.ones(int(at_home.sum()), np.bool_))
        source.spans(epochs, (0, *row[1:3].tolist()))
    assert len(source._pools) <= min(lanes + 1, -(-lanes // ranks) + 9)
    assert len(source._spans) <= len(source._pools)
    assert all(source._pools[key] is packed for key, packed in kept.items()), "its own are packed once"


def test_a_capped_corpus_gives_its_epochs_and_then_says_so(folder: Path) -> None:
    source, epochs = opened(folder, max_epochs=2)
    source.check_supply(epochs, 5999)
    message = "Corpus 'web' has given all 6,000 sequences of its 2 epochs. Train for fewer steps"
    with pytest.raises(CorpusExhausted, match=message):
        source.check_supply(epochs, 6000)


def test_a_streamed_corpus_is_awaited_and_its_next_part_found(tmp_path: Path) -> None:
    folder = streamed_corpus(tmp_path / "s", [4] * 10)
    source = CorpusReader("web", folder, rule="concat", max_epochs=None)
    epochs = source.extended_to(begin(plan(streamed=True), source.corpus), 0)
    assert (epochs.parts, epochs.ends) == (1, 20)
    grow(folder, [4] * 5)
    longer = source.extended_to(epochs, 20)
    assert (longer.parts, longer.ends) == (2, 30)
    assert (epochs.parts, epochs.ends) == (1, 20), "what others hold stays as it was"


def test_a_streamed_corpus_that_gives_nothing_more_in_time_is_an_error(tmp_path: Path) -> None:
    folder = streamed_corpus(tmp_path / "s", [4] * 10)
    source = CorpusReader("web", folder, rule="concat", max_epochs=None, wait_seconds=0)
    with pytest.raises(CorpusError, match=r"No part of corpus 'web' was finished in 0 s\. Start its"):
        source.extended_to(begin(plan(streamed=True), source.corpus), 20)
