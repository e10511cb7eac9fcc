"""The laws of the loader, over random corpora and random schedules of ranks and batch sizes."""

import json
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.data import Loader
from penstock.testing.corpora import numbered_corpus
from tests.examples import examples
from tests.property.strategies import LENGTHS, PACKINGS, RULES

PER_STEP = {"num_workers": 0, "deliver": "numpy"}


@given(LENGTHS, RULES, st.integers(2, 70), st.integers(0, 5), st.integers(1, 50), st.integers(1, 3))
@examples(150)
def test_an_epoch_is_the_corpus_exactly(lengths, rule, sequence_length, seed, per_shard, epochs):
    with tempfile.TemporaryDirectory() as folder:
        corpus = numbered_corpus(Path(folder), lengths, documents_per_shard=per_shard)
        loader = Loader(
            {"c": corpus},
            sequence_length=sequence_length,
            global_batch_size=1,
            packing=rule,
            seed=seed,
            epochs={"c": epochs},
            fields=("input_ids", "labels", "cu_seqlens", "position_ids", "document_ids"),
            **PER_STEP,
        )
        total = sum(lengths)
        ends = set(np.cumsum(lengths).tolist())
        samples = loader.num_samples
        assert samples == epochs * -(-total // sequence_length)
        for epoch in range(epochs):
            seen = Counter()
            for step in range(epoch * samples // epochs, (epoch + 1) * samples // epochs):
                seen.update(_checked_row(loader.batch_at(step), ends))
            assert seen == Counter(range(1, total + 1))


def _checked_row(batch, ends):
    """Check one row's labels and document fields against the numbered corpus; return its tokens."""
    tokens, labels = batch["input_ids"][0], batch["labels"][0]
    bounds = batch["cu_seqlens"].tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(tokens)
    served = []
    for ordinal, (start, stop) in enumerate(pairwise(bounds)):
        piece, next_ones = tokens[start:stop], labels[start:stop]
        assert batch["position_ids"][0, start:stop].tolist() == list(range(stop - start))
        assert (batch["document_ids"][0, start:stop] == ordinal).all()
        if piece[0] == 0:  # padding
            assert stop == len(tokens)
            assert (piece == 0).all()
            assert (next_ones == -100).all()
            continue
        assert piece.tolist() == list(range(int(piece[0]), int(piece[0]) + stop - start)), (
            "one run of one document"
        )
        assert not ends & set(piece[:-1].tolist()), "no document ends inside"
        expected = [int(t) + 1 for t in piece]
        if int(piece[-1]) in ends:
            expected[-1] = -100
        assert next_ones.tolist() == expected
        served += piece.tolist()
    return served


@st.composite
def schedules(draw):
    """Stretches of (ranks, workers, steps, global batch size), each after a save and a load."""
    stretches = []
    for _ in range(draw(st.integers(1, 5))):
        ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
        batch = ranks * draw(st.integers(1, 4))
        stretches.append((ranks, draw(st.integers(0, 2)), draw(st.integers(0, 4)), batch))
    return stretches


@given(LENGTHS, LENGTHS, PACKINGS, schedules(), st.integers(0, 3))
@examples(30)
def test_any_schedule_of_ranks_workers_and_batch_sizes_serves_the_same_samples(
    one, two, packing, schedule, seed
):
    with tempfile.TemporaryDirectory() as folder:
        corpora = {
            "one": numbered_corpus(Path(folder, "one"), one),
            "two": numbered_corpus(Path(folder, "two"), two),
        }
        common = {
            "weights": {"one": 2, "two": 1},
            "sequence_length": 16,
            **packing,
            "seed": seed,
            "deliver": "numpy",
        }
        plain = Loader(corpora, global_batch_size=1, num_workers=0, **common)
        state, total = None, 0
        for ranks, workers, steps, batch in schedule:
            served, states = {}, []
            for rank in range(ranks):
                loader = Loader(
                    corpora,
                    global_batch_size=batch,
                    rank=rank,
                    world_size=ranks,
                    num_workers=workers,
                    **common,
                )
                if state is not None:
                    loader.load_state_dict(json.loads(json.dumps(state)), on_change="apply")
                batches = iter(loader)
                for _ in range(steps):
                    got = next(batches)
                    assert len(got["sample_ids"]) == batch // ranks
                    for sample, tokens, labels in zip(
                        got["sample_ids"].tolist(), got["input_ids"], got["labels"], strict=True
                    ):
                        assert sample not in served
                        served[sample] = (tokens.copy(), labels.copy())
                batches.close()
                states.append(loader.state_dict())
            assert all(other == states[0] for other in states), "the state is equal on all ranks"
            state = states[0]
            assert sorted(served) == list(range(total, total + steps * batch))
            for sample, (tokens, labels) in served.items():
                expected = plain.batch_at(sample)
                assert (expected["input_ids"][0] == tokens).all()
                assert (expected["labels"][0] == labels).all()
            total += steps * batch


@given(LENGTHS, st.lists(st.integers(1, 9), min_size=1, max_size=6))
@examples(40)
def test_loading_a_state_gives_the_same_state_and_a_small_one(lengths, steps_between):
    with tempfile.TemporaryDirectory() as folder:
        corpora = {"c": numbered_corpus(Path(folder), lengths)}
        make = {"sequence_length": 8, "global_batch_size": 4, **PER_STEP}
        loader = Loader(corpora, **make)
        for steps in steps_between:
            batches = iter(loader)
            for _ in range(steps):
                next(batches)
            state = loader.state_dict()
            text = json.dumps(state)
            assert len(text) < 4096
            again = Loader(corpora, **make)
            again.load_state_dict(json.loads(text))
            assert again.state_dict() == state
            loader = again
        assert loader.step == sum(steps_between)


@given(LENGTHS, PACKINGS, st.integers(1, 3))
@examples(30)
def test_replay_after_batch_size_changes_gives_what_was_served(lengths, packing, changes):
    with tempfile.TemporaryDirectory() as folder:
        corpora = {"c": numbered_corpus(Path(folder), lengths)}
        served, state = [], None
        for size in range(2, 2 + changes + 1):
            loader = Loader(corpora, sequence_length=8, global_batch_size=size, **packing, **PER_STEP)
            if state is not None:
                loader.load_state_dict(state, on_change="apply")
            batches = iter(loader)
            served += [next(batches)["sample_ids"].tolist() for _ in range(3)]
            state = loader.state_dict()
        assert [loader.batch_at(step)["sample_ids"].tolist() for step in range(len(served))] == served


@given(LENGTHS, st.floats(0, 0.5), st.integers(2, 20))
@examples(60)
def test_the_training_and_heldout_parts_are_the_corpus_and_share_no_document(lengths, share, sequence_length):
    with tempfile.TemporaryDirectory() as folder:
        corpus = numbered_corpus(Path(folder), lengths)
        seen = {}
        for split in ("train", "heldout"):
            try:
                loader = Loader(
                    {"c": corpus}, sequence_length=sequence_length, global_batch_size=1, holdout=share,
                    split=split, epochs={"c": 1}, **PER_STEP,
                )  # fmt: skip
            except ConfigError:
                seen[split] = []  # refused: a part without a document
                continue
            rows = [loader.batch_at(step) for step in range(loader.num_samples)]
            seen[split] = [token for row in rows for token in row["input_ids"][0].tolist() if token]
        assert sorted(seen["train"] + seen["heldout"]) == list(range(1, sum(lengths) + 1))
        edges = np.cumsum([1, *lengths])
        of_train = set(np.searchsorted(edges, seen["train"], side="right").tolist())
        of_heldout = set(np.searchsorted(edges, seen["heldout"], side="right").tolist())
        assert not of_train & of_heldout
