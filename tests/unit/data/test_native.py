"""The compiled loops equal their plain references, and nothing needs them."""

import ctypes
import logging
import shutil
import tempfile
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.core.arrays import address
from penstock.core.errors import CorpusError
from penstock.data import Loader, corpus_reader, native, reader
from penstock.data.collate import FIELDS, BatchBuffers, collate, gather
from penstock.data.corpus.corpus import Corpus
from penstock.data.formats.index import DocumentEnds
from penstock.data.order import pool
from penstock.data.order.pool import PackedPool
from penstock.data.row_spans import RowSpans, spans_of
from penstock.data.types import PADDING
from penstock.testing.corpora import numbered_corpus, write_corpus
from tests.examples import examples
from tests.property.strategies import LENGTHS, PACKINGS

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler here")


def corpus_of(*shards, tokens=()):
    """Return a corpus of shards, each given as the ends of its documents, with or without their tokens."""
    sizes = [int(ends[-1]) for ends in shards] if shards else [len(of) for of in tokens]

    def open_shard(index):
        return SimpleNamespace(
            tokens=tokens[index] if tokens else None,
            document_ends=DocumentEnds(shards[index], num_tokens=sizes[index], name="shard").between
            if shards
            else None,
        )

    manifest = SimpleNamespace(
        num_documents=0, fingerprint="", dtype=getattr(tokens and tokens[0], "dtype", None)
    )
    return Corpus("made", manifest, starts=np.cumsum([0, *sizes]), open_shard=open_shard)


@needs_compiler
def test_what_is_here_compiles():  # or the tests below would hold nothing
    assert native.library() is not None


@needs_compiler
@given(
    st.lists(
        st.lists(st.integers(0, 40) | st.integers(0, 3) | st.integers(100, 900), min_size=1, max_size=60),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 65) | st.just(512),
    st.sampled_from(pool.COMPILED),
    st.integers(0, 2**64 - 1),
    st.sampled_from([0, 2**31 - 40, 2**40]),
    st.randoms(use_true_random=False),
)
@examples(400)
def test_a_pool_is_packed_as_its_reference_packs_it(lengths, length, rule, key, first, random):
    # The first document of each shard is as long as `first`, and stays outside the ranges.
    corpus = corpus_of(*(first + np.cumsum(of) for of in lengths if first + sum(of)))
    ranges = []
    for start, stop in pairwise(corpus.starts.tolist()):
        edges = sorted(random.randint(start + first, stop) for _ in range(4))
        ranges += [(low, high) for low, high in (edges[:2], edges[2:]) if low < high]
    random.shuffle(ranges)
    assume(ranges)
    keys = [key, key ^ 1]
    space = SimpleNamespace(corpus=corpus)
    expected = pool._pack(corpus.fragments(ranges), space, length=length, rule=rule, keys=keys)
    shard_ranges = corpus.shard_ranges(ranges)
    packed = pool._compiled_pack(native.library(), shard_ranges, length=length, rule=rule, keys=keys)
    assert packed.pieces.dtype == expected.pieces.dtype
    assert packed.pieces.tolist() == expected.pieces.tolist()
    assert packed.firsts.tolist() == expected.firsts.tolist()
    assert packed.pasts.tolist() == expected.pasts.tolist()


@needs_compiler
@pytest.mark.parametrize("ends", [[3, 9, 5, 20], [7, 2, 20], [4, 4, 3, 20]])
def test_ends_that_do_not_rise_are_left_to_the_reference_which_refuses_them(ends):
    corpus = corpus_of(np.array(ends))
    found = corpus.shard_ranges([(0, 20)])
    options = {"length": 4, "rule": "concat", "keys": [1, 2]}
    assert pool._compiled_pack(native.library(), found, **options) is None
    with pytest.raises(CorpusError, match="do not rise"):
        corpus.fragments([(0, 20)])


def plain_and_compiled(monkeypatch, make, steps):
    """Return the batches of a loader without and with the compiled loops."""
    compiled = [make().batch_at(step) for step in steps]
    for module in (reader, pool):
        monkeypatch.setattr(module, "library", lambda: None)
    return [make().batch_at(step) for step in steps], compiled


def assert_equal(plain, compiled):
    for one, other in zip(plain, compiled, strict=True):
        assert list(one) == list(other)
        for name in one:
            assert one[name].dtype == other[name].dtype, name
            assert one[name].tolist() == other[name].tolist(), name


@needs_compiler
@given(
    LENGTHS,
    PACKINGS,
    st.integers(2, 70),
    st.integers(1, 7),
    st.integers(1, 50),
    st.sampled_from([65_536, 2**20]),
    st.sampled_from(["int64", "int32"]),
)
@examples(60)
def test_batches_are_those_of_the_plain_reference(
    lengths, packing, length, rows, per_shard, vocab_size, dtype
):
    documents = [np.random.default_rng(size).integers(1, vocab_size, size) for size in lengths]
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(
            Path(folder) / "c", documents, vocab_size=vocab_size, documents_per_shard=per_shard
        )

        def make():
            return Loader(
                {"c": corpus},
                sequence_length=length,
                global_batch_size=rows,
                fields=FIELDS,
                dtype=dtype,
                num_workers=0,
                deliver="numpy",
                **packing,
            )

        assert_equal(*plain_and_compiled(patch, make, range(4)))


@needs_compiler
def test_a_mixture_is_gathered_as_its_reference_gathers_it(tmp_path, monkeypatch):
    narrow = write_corpus(tmp_path / "narrow", [range(1, 50)] * 30, vocab_size=100)
    wide = numbered_corpus(tmp_path / "wide", [70_000, 3, 0, 900, 1])

    def make():
        return Loader(
            {"narrow": narrow, "wide": wide},
            weights={"narrow": 0.3, "wide": 0.7},
            sequence_length=64,
            global_batch_size=24,
            fields=FIELDS,
            num_workers=0,
            deliver="numpy",
        )

    assert_equal(*plain_and_compiled(monkeypatch, make, (0, 1, 17, 400)))


def packed_rows(*rows):
    """Return a pool of hand-made rows."""
    ends = np.cumsum([len(row) for row in rows]).astype(np.int32)
    firsts = np.concatenate(([0], ends[:-1])).astype(np.int32)
    return PackedPool(np.array([piece for row in rows for piece in row]), firsts.data, ends.data)


@needs_compiler
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("odd", [0, 1, 3])
def test_tokens_at_odd_addresses_are_read_as_they_are(dtype, odd):
    values = np.arange(1, 200, dtype=dtype)
    held = np.zeros(odd + values.nbytes, np.uint8)
    held[odd:] = values.view(np.uint8)
    corpus = corpus_of(tokens=[held[odd:].view(dtype)])
    rows = [[(0, 3, 70, 1)], [(0, 0, 60, 0), (PADDING, 0, 7, 0)]]
    found = spans_of(native.library(), packed_rows(*rows), corpus)
    spans = RowSpans(
        np.zeros((1, 2), np.int64),
        np.array([[[0, 0, 0, 1], [0, 0, 0, 0]]]),
        lambda *_: found,
        lambda *_: None,
    )
    made = gather(native.library(), spans.step(0), length=67, fields=FIELDS, buffers=BatchBuffers())
    expected = collate(
        [(corpus, [np.array(rows[1]), np.array(rows[0])])], length=67, fields=FIELDS, buffers=BatchBuffers()
    )
    assert_equal([expected], [made])


@needs_compiler
def test_some_rows_of_a_step_are_taken_in_the_order_asked_for():
    corpus = corpus_of(tokens=[np.arange(1, 100, dtype=np.uint16)])
    pools = {n: packed_rows([(0, n, n + 5, 0)], [(0, n + 5, n + 10, 0)]) for n in (0, 50)}
    found = {n: spans_of(native.library(), packed, corpus) for n, packed in pools.items()}
    row_addresses = np.array([[[0, 0, 0, 0], [0, 0, 50, 1], [0, 0, 0, 1], [0, 0, 50, 0]]])
    rows = RowSpans(np.zeros((1, 4), np.int64), row_addresses, lambda _, at: found[at[2]], lambda *_: None)
    options = {"length": 5, "fields": ("input_ids",), "buffers": BatchBuffers()}
    some = gather(native.library(), rows.step(0, np.array([3, 0])), **options)["input_ids"]
    assert some.tolist() == [[51, 52, 53, 54, 55], [1, 2, 3, 4, 5]]
    every = gather(native.library(), rows.step(0), **options)["input_ids"]
    assert every[:, 0].tolist() == [1, 56, 6, 51]


def test_of_a_pool_that_two_threads_look_for_the_one_found_first_stays():
    corpus, between = corpus_of(tokens=[np.arange(1, 100, dtype=np.uint16)]), []

    def find(_, __):
        if not between:
            between.append(None)
            other = rows.step(0)  # another thread comes in between, and reads
            assert other.count(native.library()) == 1
            between[0] = other, rows._table[0].tolist()
        return spans_of(native.library(), packed_rows([(0, 0, 5, 0)]), corpus)

    rows = RowSpans(np.zeros((1, 1), np.int64), np.zeros((1, 1, 4), np.int64), find, lambda *_: None)
    outer = rows.step(0)
    assert outer.count(native.library()) == 1
    step, table = between[0]
    assert rows._table[0].tolist() == table, "what the other thread reads"
    options = {"length": 5, "fields": ("input_ids",), "buffers": BatchBuffers()}
    for each in (step, outer):
        assert gather(native.library(), each, **options)["input_ids"].tolist() == [[1, 2, 3, 4, 5]]


@needs_compiler
@pytest.mark.parametrize(
    "piece", [(0, -1, 4, 0), (0, 5, 11, 0), (0, 6, 10, 1), (0, 4, 4, 0), (0, 2**40, 2**40 + 3, 0)]
)
def test_a_piece_that_leads_outside_its_shard_has_no_address(piece):
    corpus = corpus_of(tokens=[np.arange(10, dtype=np.uint16)])
    with pytest.raises(CorpusError, match=r"lies outside its shard.*data verify"):
        spans_of(native.library(), packed_rows([(0, 0, 10, 0)], [piece]), corpus)


@needs_compiler
def test_rows_that_lie_in_no_memory_map_are_left_to_the_reference():
    corpus = corpus_of(tokens=[[1, 2, 3, 4]])
    assert spans_of(native.library(), packed_rows([(0, 0, 4, 0)]), corpus) is None
    spans = RowSpans(
        np.zeros((1, 1), np.int64), np.zeros((1, 1, 4), np.int64), lambda *_: None, lambda *_: None
    )
    assert spans.step(0).count(native.library()) is None


@needs_compiler
def test_what_a_pool_needs_of_local_files_is_asked_for_once(tmp_path, monkeypatch):
    corpus = numbered_corpus(tmp_path / "c", [3000] * 40, documents_per_shard=10)
    loader = Loader({"c": corpus}, sequence_length=512, global_batch_size=4, deliver="numpy")
    asked = []

    class Recorded:
        def __getattr__(self, name):
            return getattr(native.library(), name)

        def penstock_read_ahead(self, at, count):
            ranges = np.ctypeslib.as_array((ctypes.c_int64 * (2 * count)).from_address(at)).reshape(-1, 2)
            asked.extend(ranges.tolist())
            return 1

    with monkeypatch.context() as patch:
        patch.setattr(corpus_reader, "library", Recorded)
        loader.batch_at(0)
        loader.batch_at(0)
    tokens = [loader.corpora["c"].shard(index).tokens for index in range(4)]
    assert sum(size for _, size in asked) == sum(of.nbytes for of in tokens), "all of it, and once"
    for at, size in asked:
        assert any(address(of) <= at and at + size <= address(of) + of.nbytes for of in tokens)
    plain = loader.batch_at(0)
    fresh = Loader({"c": corpus}, sequence_length=512, global_batch_size=4, deliver="numpy").batch_at(0)
    assert_equal([plain], [fresh])  # hints that the system is really given change nothing


def test_without_a_compiler_it_is_said_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", "no-such-compiler")
    asked_again = cache(native.library.__wrapped__)
    with caplog.at_level(logging.WARNING):
        assert asked_again() is None
        assert asked_again() is None
    assert len(caplog.records) == 1
    assert "numpy makes batches instead" in caplog.text
    assert "no C compiler" in caplog.text
