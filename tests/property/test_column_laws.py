"""A column beside the tokens reaches its labels, however rows are packed, divided and resumed."""

import json
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import Loader, open_corpus, reader
from penstock.data.corpus.columns import ColumnWriter
from penstock.data.corpus.manifest import ColumnEntry
from penstock.data.native import library
from penstock.testing.corpora import numbered_corpus, write_corpus
from tests.examples import examples
from tests.property.strategies import LENGTHS, PACKINGS


def flagged_corpus(folder, lengths, *, seed, documents_per_shard):
    """Write a numbered corpus with the columns `learned` and `rejected`; return it and the bits."""
    starts = np.cumsum([1, *lengths])
    random = np.random.default_rng(seed)
    bits = {name: random.random(int(starts[-1]) - 1) < 0.6 for name in ("learned", "rejected")}
    by_document = {
        name: [each[first - 1 : first - 1 + n] for first, n in zip(starts, lengths, strict=False)]
        for name, each in bits.items()
    }
    documents = [range(first, first + n) for first, n in zip(starts, lengths, strict=False)]
    write_corpus(
        folder,
        documents,
        vocab_size=2**20,
        documents_per_shard=documents_per_shard,
        columns=by_document,
    )
    return folder, bits


def plain_corpus(folder, lengths, *, documents_per_shard):
    starts = np.cumsum([1, *lengths])
    documents = [range(first, first + n) for first, n in zip(starts, lengths, strict=False)]
    return write_corpus(folder, documents, vocab_size=2**20, documents_per_shard=documents_per_shard)


def expected(plain, bits):
    """Labels that name an unlearned token are -100; the token with number n is at position n - 1."""
    return np.array(
        [[label if label > 0 and bits[label - 1] else -100 for label in row] for row in plain.tolist()]
    )


@given(
    LENGTHS,
    PACKINGS,
    st.integers(2, 70),
    st.integers(0, 3),
    st.integers(1, 40),
    st.sampled_from(["int64", "int32"]),
    st.booleans(),
    st.sampled_from([(1, 2), (2, 3)]),
)
@examples(30)
def test_labels_are_those_of_a_plain_reference(
    lengths, packing, sequence_length, seed, per_shard, dtype, compiled, ranks
):
    world_size, local = ranks
    with tempfile.TemporaryDirectory() as folder:
        plain = plain_corpus(Path(folder, "plain"), lengths, documents_per_shard=per_shard)
        flagged, bits = flagged_corpus(
            Path(folder, "flagged"), lengths, seed=seed, documents_per_shard=per_shard
        )
        shown = reader.library
        reader.library = library if compiled else lambda: None
        try:
            for rank in range(world_size):
                common = {
                    "sequence_length": sequence_length,
                    "global_batch_size": world_size * local,
                    "rank": rank,
                    "world_size": world_size,
                    "seed": seed,
                    "dtype": dtype,
                    "deliver": "numpy",
                    "num_workers": 0,
                    **packing,
                }
                both = {"a": 1, "b": 1}
                one = Loader({"a": plain, "b": plain}, weights=both, **common)
                fields = ("input_ids", "labels", "rejected", "learned")
                other = Loader({"a": flagged, "b": flagged}, weights=both, fields=fields, **common)
                alone = Loader({"a": flagged, "b": flagged}, weights=both, fields=("rejected",), **common)
                for step in (0, 5):
                    want, got = one.batch_at(step), other.batch_at(step)
                    assert got["input_ids"].tolist() == want["input_ids"].tolist()
                    assert got["labels"].tolist() == expected(want["labels"], bits["learned"]).tolist()
                    assert (got["learned"] == (got["labels"] != -100)).all()
                    rejected = [
                        [bool(label > 0 and bits["rejected"][label - 1]) for label in row]
                        for row in want["labels"].tolist()
                    ]
                    assert got["rejected"].tolist() == rejected
                    alone = Loader({"a": flagged, "b": flagged}, weights=both, fields=("rejected",), **common)
                    assert alone.batch_at(step)["rejected"].tolist() == rejected
        finally:
            reader.library = shown


@given(
    LENGTHS, PACKINGS, st.integers(0, 3), st.integers(1, 6), st.integers(1, 40), st.none() | st.integers(0, 3)
)
@examples(15)
def test_a_resumed_and_rescaled_mixture_with_plain_text_serves_the_same_labels(
    lengths, packing, seed, saved_at, per_shard, text_weight
):
    """And one whose weights change while it is served."""
    with tempfile.TemporaryDirectory() as folder:
        plain = numbered_corpus(Path(folder, "plain"), lengths)
        flagged, bits = flagged_corpus(
            Path(folder, "flagged"), lengths, seed=seed, documents_per_shard=per_shard
        )
        common = {
            "weights": {"chats": 2, "text": 1},
            "sequence_length": 16,
            "seed": seed,
            "deliver": "numpy",
            "num_workers": 0,
            **packing,
        }

        def labels(samples, chats, world_size):
            """Return the labels by sample of some steps of six rows, of a run that changed its ranks."""
            found = {}
            for rank in range(world_size):
                run = Loader(
                    {"chats": chats, "text": plain},
                    global_batch_size=6,
                    rank=rank,
                    world_size=world_size,
                    **common,
                )
                run.load_state_dict(json.loads(json.dumps(run.state_at(saved_at))))
                if text_weight is not None:
                    run.set_weights({"chats": 1, "text": text_weight}, step=saved_at + 1)
                for step in samples:
                    batch = run.batch_at(step)
                    found |= dict(zip(batch["sample_ids"].tolist(), batch["labels"], strict=True))
            return found

        steps = range(saved_at, saved_at + 3)
        want, got = labels(steps, plain, 1), labels(steps, flagged, 3)
        whole = Loader({"chats": plain, "text": plain}, global_batch_size=6, **common)
        if text_weight is not None:
            whole.set_weights({"chats": 1, "text": text_weight}, step=saved_at + 1)
        corpora = whole.corpora_of(np.array(sorted(want)))
        for sample, corpus in zip(sorted(want), corpora.tolist(), strict=True):
            row = want[sample][None]
            row = expected(row, bits["learned"]) if corpus == 0 else row
            assert got[sample].tolist() == row[0].tolist()


@given(LENGTHS, PACKINGS, st.integers(1, 40), st.integers(1, 3), st.data())
@examples(15)
def test_numbers_attached_later_are_those_that_were_put(lengths, packing, per_shard, width, data):
    with tempfile.TemporaryDirectory() as folder:
        corpus = numbered_corpus(Path(folder, "corpus"), lengths, documents_per_shard=per_shard)
        manifest, total = open_corpus(corpus).manifest, sum(lengths)
        entries = [
            ColumnEntry(name="reference", dtype="float32"),
            ColumnEntry(name="teacher_ids", dtype="int32", width=width),
            ColumnEntry(name="picked", dtype="bit"),
        ]
        numbers = np.arange(1, total + 1)
        with ColumnWriter(Path(folder, "columns"), manifest, entries, made_with={"k": width}) as writer:
            edges = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=5))})
            for first, past in data.draw(st.permutations(list(pairwise(edges)))):
                part = numbers[first:past]
                writer.put("reference", first, -part / 2)
                several = part[:, None] * 10 + np.arange(width)
                writer.put("teacher_ids", first, several if width > 1 else several[:, 0])
                writer.put("picked", first, part % 3 == 0)
        loader = Loader(
            {"c": corpus},
            columns={"c": Path(folder, "columns")},
            sequence_length=16,
            global_batch_size=3,
            fields=("labels", "reference", "teacher_ids", "picked"),
            deliver="numpy",
            num_workers=0,
            **packing,
        )
        for step in range(4):
            batch = loader.batch_at(step)
            labels = batch["labels"]
            assert batch["reference"].dtype == np.float32
            there = labels != -100
            assert (batch["reference"] == np.where(there, -labels / 2, 0)).all()
            assert (batch["picked"] == (there & (labels % 3 == 0))).all()
            for k in range(width):
                ids = batch["teacher_ids"][..., k] if width > 1 else batch["teacher_ids"]
                assert (ids == np.where(there, labels * 10 + k, 0)).all()
