"""One corpus as endless rows: packed once, shared by threads, ended by its cap."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from penstock.core.errors import CorpusExhausted
from penstock.data.holdout import part_of
from penstock.data.opening import open_corpus
from penstock.data.order import choose_geometry
from penstock.data.source import Source
from penstock.testing.corpora import numbered_corpus

TOKENS = 6000
LENGTH = 2  # pools of 512 tokens: 12 pools, 2 lanes


@pytest.fixture
def open_source(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    folder = numbered_corpus(tmp_path_factory.mktemp("c"), [10] * (TOKENS // 10))

    def opened(*, max_epochs: int | None = None) -> Source:
        space = part_of(open_corpus(folder), name="web", split="train", holdout=0.0)
        geometry = choose_geometry(TOKENS, sequence_length=LENGTH)
        return Source("web", space, geometry, seed=0, rule="best_fit", max_epochs=max_epochs)

    return opened


def tables(source: Source, samples: np.ndarray) -> list[list[list[int]]]:
    places = source.locate(samples)
    return [table.tolist() for table in source.rows(places.epoch, places.pool, places.row)]


def test_rows_do_not_depend_on_the_order_they_are_read_in(open_source) -> None:  # type: ignore[no-untyped-def]
    samples = np.arange(0, 2 * TOKENS // LENGTH, 13)
    forward = tables(open_source(), samples)
    backward = tables(open_source(), samples[::-1])
    shuffled = np.arange(len(samples)) * 97 % len(samples)
    assert backward[::-1] == forward
    assert tables(open_source(), samples[shuffled]) == [forward[i] for i in shuffled.tolist()]


def test_a_pool_is_packed_once_while_its_lane_is_at_it(open_source) -> None:  # type: ignore[no-untyped-def]
    source = open_source()
    places = source.locate(np.arange(200))
    first = source.rows(places.epoch[:2], places.pool[:2], places.row[:2])
    for index in range(2, 200, 2):
        chosen = slice(index, index + 2)
        rows = source.rows(places.epoch[chosen], places.pool[chosen], places.row[chosen])
        assert all(a.base is b.base for a, b in zip(first, rows, strict=True)), "views of the same table"


def test_threads_that_read_the_same_rows_get_the_same_ones(open_source) -> None:  # type: ignore[no-untyped-def]
    source, samples = open_source(), np.arange(0, 2 * TOKENS // LENGTH, 11)
    expected = tables(open_source(), samples)
    with ThreadPoolExecutor(6) as workers:
        assert all(found == expected for found in workers.map(lambda _: tables(source, samples), range(12)))


def test_a_capped_corpus_gives_its_epochs_and_then_says_so(open_source) -> None:  # type: ignore[no-untyped-def]
    source = open_source(max_epochs=2)
    assert source.max_samples == 6000
    assert source.locate(np.array([5999])).epoch.tolist() == [1]
    message = "Corpus 'web' has given all 6,000 sequences of its 2 epochs. Train for fewer steps"
    with pytest.raises(CorpusExhausted, match=message):
        source.locate(np.array([0, 6000]))
    assert len(source.locate(np.array([], dtype=np.int64)).epoch) == 0


def test_the_identity_is_the_sizes_and_the_contents(open_source) -> None:  # type: ignore[no-untyped-def]
    source = open_source()
    assert source.identity() == {
        "T": TOKENS,
        "B": 32,
        "K": 16,
        "V": 2,
        "fingerprint": source.space.corpus.fingerprint,
    }
