"""Laws of formats: conversion loses nothing, computed corpora are one partition, documents are found."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import open_corpus
from penstock.data.formats.flat import Separator, document_chunks
from penstock.data.tools.convert import convert, spans
from penstock.testing.corpora import numbered_corpus
from tests.examples import examples
from tests.property.strategies import LENGTHS


@given(LENGTHS, st.integers(1, 50), st.integers(1, 2000))
@examples(25)
def test_there_and_back_is_the_same_and_no_document_is_lost_on_the_way(lengths, per_shard, limit):
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        own = numbered_corpus(folder / "own", lengths, documents_per_shard=per_shard)
        convert(own, folder / "megatron", to="megatron", shard_tokens=limit)
        cut = open_corpus(folder / "megatron")
        found = [
            length
            for index in range(len(cut.manifest.shards))
            for _, _, offsets in spans(cut.shard(index), 10**9)
            for length in np.diff(offsets).tolist()
        ]
        assert found == lengths
        assert cut.tokens(0, sum(lengths)).tolist() == list(range(1, sum(lengths) + 1))
        convert(own, folder / "whole", to="megatron")
        convert(folder / "whole", folder / "back", to="arrow")
        same = open_corpus(folder / "back").fingerprint == open_corpus(own).fingerprint
        assert same or any(shard.documents == 0 for shard in open_corpus(own).manifest.shards)


@given(
    tokens=st.integers(1, 30_000),
    mean=st.integers(1, 700),
    seed=st.integers(0, 9),
    shards=st.integers(1, 9),
    places=st.lists(st.tuples(st.integers(0, 30_000), st.integers(0, 30_000)), min_size=1, max_size=20),
)
@examples(100)
def test_a_computed_corpus_is_one_partition_whatever_range_is_asked(tokens, mean, seed, shards, places):
    shards = min(shards, -(-tokens // (64 * mean)))
    spec = f"synthetic:tokens={tokens},mean_document={mean},seed={seed},shards={shards},vocab_size=70000"
    corpus = open_corpus(spec)
    whole = corpus.fragments([(0, tokens)])
    assert int(whole.lengths.sum()) == tokens
    assert not whole.continued.any()
    ends = whole.starts + whole.lengths
    served = corpus.tokens(0, tokens)
    for one, two in places:
        start, stop = sorted((one % (tokens + 1), two % (tokens + 1)))
        if start < stop:
            part = corpus.fragments([(start, stop)])
            assert (part.starts + part.lengths).tolist() == sorted(
                {*ends[(ends > start) & (ends <= stop)], stop}
            )
            assert np.array_equal(corpus.tokens(start, stop), served[start:stop])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200), st.booleans())
@examples(100)
def test_the_documents_of_a_flat_file_are_its_runs_between_separators(ids, before):
    tokens = np.array(ids, np.uint16)
    found = [int(end) for ends, _ in document_chunks(tokens, Separator(0, before=before)) for end in ends]
    places = [place + (not before) for place, token in enumerate(ids) if token == 0]
    assert found == [place for place in places if place]
