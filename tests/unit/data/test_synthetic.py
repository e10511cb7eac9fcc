"""Computed corpora: one partition whatever is asked, tokens that depend on their position only."""

from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import UsageError
from penstock.data import Loader, open_corpus
from penstock.data.corpus.synthetic import parse
from penstock.data.tools.convert import convert

MANY = "synthetic:tokens=1e14,mean_document=900,seed=1"


def test_all_ranges_agree_on_the_documents() -> None:
    corpus = open_corpus("synthetic:tokens=30000,mean_document=20,seed=3,shards=7")
    whole = corpus.fragments([(0, 30000)])
    ends = set((whole.starts + whole.lengths).tolist())
    rng = np.random.default_rng(0)
    for start, stop in np.sort(rng.integers(0, 30001, (200, 2)), axis=1).tolist():
        if start < stop:
            part = corpus.fragments([(start, stop)])
            assert set((part.starts + part.lengths).tolist()) == {e for e in ends if start < e <= stop} | {
                stop
            }
    assert int(whole.lengths.sum()) == 30000
    assert 15 < whole.lengths.mean() < 25
    assert (whole.lengths == 1).any()
    assert whole.lengths.max() > 60


@pytest.mark.parametrize("shards", [1, 3])
def test_counts_are_those_of_the_documents_served(shards: int) -> None:
    for tokens in (1, 63, 64, 640, 641, 9999):
        corpus = open_corpus(
            f"synthetic:tokens={tokens},mean_document=3,shards={min(shards, -(-tokens // 192))}"
        )
        found = [corpus.shard(i).document_ends(0, e.tokens) for i, e in enumerate(corpus.manifest.shards)]
        assert [len(ends) for ends in found] == [entry.documents for entry in corpus.manifest.shards]
        assert sum(map(len, found)) == corpus.num_documents
        assert [int(ends[-1]) for ends in found] == [entry.tokens for entry in corpus.manifest.shards]


@pytest.mark.parametrize("vocab_size", [1, 300, 2**16, 2**16 + 1, 2**32])
def test_a_token_depends_on_its_position_only(vocab_size: int) -> None:
    corpus = open_corpus(f"synthetic:tokens=400k,vocab_size={vocab_size},shards=3")
    whole = corpus.tokens(0, 400_000)
    assert int(whole.max()) < vocab_size
    assert vocab_size == 1 or int(whole.max()) > 0.99 * vocab_size - 2
    for start, stop in ((0, 1), (65_535, 65_537), (130_000, 300_000), (399_999, 400_000), (5, 5)):
        assert np.array_equal(corpus.tokens(start, stop), whole[start:stop]) if start < stop else True
    assert whole.dtype == ("uint16" if vocab_size <= 2**16 else "uint32")


def test_seeds_and_places_give_other_tokens() -> None:
    one, two = (open_corpus(f"synthetic:tokens=1e9,seed={seed}") for seed in (1, 2))
    runs = [c.tokens(at, at + 1000).tobytes() for c in (one, two) for at in range(0, 10**9, 9**8)]
    assert len(set(runs)) == len(runs)
    assert one.fingerprint != two.fingerprint


def test_ten_to_the_fourteen_tokens_are_read_anywhere() -> None:
    corpus = open_corpus(MANY)
    assert corpus.num_tokens == 10**14
    assert corpus.num_documents == pytest.approx(10**14 / 900, rel=1e-6)
    assert len(corpus.tokens(10**14 - 10, 10**14)) == 10
    found = corpus.fragments([(10**14 - 10**5, 10**14)])
    assert int(found.lengths.sum()) == 10**5
    middle = corpus.next_document(5 * 10**13)
    assert 0 <= middle - 5 * 10**13 < 10**5


def test_the_loader_reads_ten_to_the_fourteen_tokens() -> None:
    loader = Loader({"c": MANY}, sequence_length=64, global_batch_size=4, num_workers=0, deliver="numpy",
                    packing="concat")  # fmt: skip
    assert loader.batch_at(10**7)["input_ids"].shape == (4, 64)


def test_shards_are_as_many_as_asked_and_even() -> None:
    for tokens, shards in ((10**6, 7), (10**14, 100_000), (5000, 1)):
        made = parse({"tokens": str(tokens), "mean_document": "10", "shards": str(shards)})
        sizes = np.diff(made.starts)
        assert (len(sizes), int(sizes.sum())) == (shards, tokens)
        assert int(sizes[:-1].max(initial=0) - sizes[:-1].min(initial=10**15)) <= made.cell
        assert [made.start(index) for index in (0, shards)] == [0, tokens]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("seed=1", r"needs its size\. Add tokens"),
        ("tokens=0", r"tokens of a synthetic corpus must be from 1 to .*got '0'"),
        ("tokens=1e99", "tokens of a synthetic corpus must be from 1"),
        ("tokens=1e-3", "tokens of a synthetic corpus must be from 1"),
        ("tokens=nane", "tokens of a synthetic corpus must be from 1"),
        ("tokens=5,mean_document=x", "mean_document of a synthetic corpus must be from 1"),
        ("tokens=5,shards=9", r"shards of a synthetic corpus must be from 1 to 1 \(got '9'\)"),
        ("tokens=5,vocab_size=0", "vocab_size of a synthetic corpus must be from 1"),
    ],
)
def test_options_out_of_range_are_named(options: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_corpus(f"synthetic:{options}")


def test_a_synthetic_corpus_can_be_written_down(tmp_path: Path) -> None:
    corpus = open_corpus("synthetic:tokens=5000,mean_document=30")
    convert("synthetic:tokens=5000,mean_document=30", tmp_path / "out", to="arrow")
    written = open_corpus(tmp_path / "out")
    assert np.array_equal(written.tokens(0, 5000), corpus.tokens(0, 5000))
    assert written.manifest.num_documents == corpus.manifest.num_documents
