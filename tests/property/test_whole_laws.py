"""The laws of packing `whole`: no document is split, none is lost but as was chosen, each is served once."""

import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.data import Loader
from penstock.data.packing import OVERLONG, PACKERS
from penstock.testing.corpora import numbered_corpus
from tests.examples import examples
from tests.property.strategies import LENGTHS

MAKE = {"num_workers": 0, "deliver": "numpy", "packing": "whole", "global_batch_size": 1}
CHOICES = st.sampled_from(OVERLONG)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=150), st.integers(40, 90), st.randoms())
@examples(200)
def test_rows_hold_each_fragment_once_and_two_rows_never_fit_in_one(lengths, row, random):
    def packed(of):
        return PACKERS["whole"](np.array(of), num_rows=0, sequence_length=row)

    pieces = packed(lengths)
    assert sorted(pieces.fragment.tolist()) == list(range(len(lengths)))
    assert not pieces.offset.any()
    assert pieces.length.tolist() == [lengths[fragment] for fragment in pieces.fragment.tolist()]
    held = sorted(int(part.sum()) for part in np.split(pieces.length, pieces.row_ends[:-1]))
    assert held[-1] <= row
    assert len(held) == 1 or held[0] + held[1] > row
    random.shuffle(lengths)
    assert len(packed(lengths).row_ends) == len(held), "the order of fragments does not matter"


def runs_of(tokens):
    """Return the runs of consecutive tokens of a row as (first, past), less the padding at its end."""
    used = np.trim_zeros(tokens, "b")
    assert used.all(), "padding comes last"
    breaks = np.flatnonzero(np.diff(used) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(used, breaks) if len(run)]


@given(LENGTHS, CHOICES, st.integers(2, 70), st.integers(0, 5), st.integers(1, 50), st.floats(0, 0.5))
@examples(150)
def test_an_epoch_serves_every_document_whole_but_those_that_no_row_holds(
    lengths, overlong, row, seed, per_shard, holdout
):
    with tempfile.TemporaryDirectory() as folder:
        corpus = numbered_corpus(Path(folder), lengths, documents_per_shard=per_shard)
        starts = np.cumsum([1, *lengths])
        seen, left_out = Counter(), 0
        refused = False
        for split in ("train", "heldout"):
            try:
                loader = Loader(
                    {"c": corpus}, sequence_length=row, overlong=overlong, seed=seed, split=split,
                    holdout=holdout, epochs={"c": 2}, **MAKE,
                )  # fmt: skip
                rows = loader.num_samples
            except ConfigError:
                refused = True
                continue
            served = [np.array(loader.batch_at(step)["input_ids"][0]) for step in range(rows)]
            per_epoch = [
                Counter(map(int, np.concatenate(served[at : at + rows // 2]))) for at in (0, rows // 2)
            ]
            for counts in per_epoch:
                del counts[0]
            assert per_epoch[0] == per_epoch[1], "every epoch is the same documents"
            seen += per_epoch[0]
            once, twice = (loader.left_out_by_corpus(steps)["c"] for steps in (rows // 2, rows))
            assert twice == once * 2
            left_out += once.left_out
        first_tokens = {
            int(start) + i
            for start, length in zip(starts[:-1], lengths, strict=True)
            if length <= row or overlong == "truncate"
            for i in range(min(length, row))
        }
        assert set(seen.values()) <= {1}
        if refused:
            assert set(seen) <= first_tokens
        else:
            assert set(seen) == first_tokens
            assert left_out == sum(lengths) - len(seen)


@given(
    LENGTHS,
    CHOICES,
    st.lists(st.tuples(st.integers(0, 9), st.integers(2, 70)), min_size=1, max_size=3),
    st.integers(2, 70),
)
@examples(100)
def test_changes_of_length_serve_no_document_twice_and_lose_none_that_fits(lengths, overlong, changes, row):
    with tempfile.TemporaryDirectory() as folder:
        corpus = numbered_corpus(Path(folder), lengths)
        rows = [row, *(to for _, to in changes)]
        if overlong == "drop" and max(min(rows), 1) < min(length for length in lengths if length):
            return  # refused: no document fits a row
        loader = Loader({"c": corpus}, sequence_length=row, overlong=overlong, epochs={"c": 1}, **MAKE)
        served, step = [], 0
        for steps, to in changes:
            step = min(step + steps, loader.num_samples)
            loader._run.step = step
            if step < loader.num_samples:
                loader.set_sequence_length(to)
        again = Loader({"c": corpus}, sequence_length=row, overlong=overlong, epochs={"c": 1}, **MAKE)
        again.load_state_dict(loader.state_dict())
        for number in range(loader.num_samples):
            tokens = loader.batch_at(number)["input_ids"]
            assert np.array_equal(tokens, again.batch_at(number)["input_ids"])
            served += runs_of(tokens[0])
        starts = np.cumsum([1, *lengths]).tolist()
        tokens = Counter(token for first, past in served for token in range(first, past))
        left_out = loader.left_out_by_corpus(loader.num_samples)["c"]
        missing = [sum(token not in tokens for token in range(*ends)) for ends in pairwise(starts)]
        assert (left_out.left_out, left_out.documents) == (sum(missing), sum(map(bool, missing)))
        assert max(tokens.values()) == 1
        for start, length in zip(starts[:-1], lengths, strict=True):
            held = [token for token in range(start, start + length) if tokens[token]]
            assert held == list(range(start, start + len(held))), "from its start"
            if length <= min(rows):
                assert len(held) == length
            elif overlong == "truncate":
                assert len(held) in {min(length, each) for each in rows}
            else:
                assert len(held) in (0, length)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.integers(2, 70),
    st.integers(0, 9),
    st.integers(2, 70),
    st.sampled_from([None, *OVERLONG]),
)
@examples(60)
def test_without_a_choice_only_documents_longer_than_a_row_are_refused(lengths, row, step, to, later):
    with tempfile.TemporaryDirectory() as folder:
        corpus = {"c": numbered_corpus(Path(folder), lengths)}
        if max(lengths) > row:
            with pytest.raises(ConfigError, match=f"longest of {max(lengths)}, "):
                Loader(corpus, sequence_length=row, **MAKE)
            return
        loader = Loader(corpus, sequence_length=row, **MAKE)
        loader._run.step = step
        before = loader.state_dict()
        if max(lengths) > to:
            with pytest.raises(ConfigError, match="longer than a row"):
                loader.set_sequence_length(to)
            assert loader.state_dict() == before, "refused before anything changes"
        else:
            loader.set_sequence_length(to)
        again = Loader(corpus, sequence_length=row, overlong=later, **MAKE)
        again.load_state_dict(loader.state_dict())
        for number in range(step + 3):
            assert np.array_equal(loader.batch_at(number)["input_ids"], again.batch_at(number)["input_ids"])
