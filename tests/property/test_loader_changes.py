"""The laws of the loader under all that it can be told: lengths, weights, corpora, sizes, skips, growth."""

import json
import pickle
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import Loader
from penstock.data.order.permutation import choose_geometry
from penstock.data.schedule.change_log import Change
from penstock.testing.corpora import numbered_corpus
from tests.examples import examples
from tests.growing import finish, grow, streamed_corpus
from tests.property.strategies import LENGTHS, PACKINGS, RULES

PER_STEP = {"num_workers": 0, "deliver": "numpy"}
ROW_LENGTHS = st.one_of(st.integers(2, 12), st.integers(2, 90), st.sampled_from([16, 128, 700, 3000]))


def advance(loader):
    """Return the next step's batch."""
    batches = iter(loader)
    batch = next(batches)
    batches.close()
    return batch


def served(batch):
    """Return the tokens of a batch without its padding."""
    return [token for token in batch["input_ids"].reshape(-1).tolist() if token]


# Sequence lengths


@given(
    LENGTHS,
    RULES,
    ROW_LENGTHS,
    st.lists(st.tuples(st.integers(0, 25), ROW_LENGTHS), min_size=1, max_size=6),
    st.integers(1, 3),
)
@examples(25)
def test_an_epoch_is_the_corpus_exactly_through_any_changes_of_length(lengths, rule, first, changes, size):
    with tempfile.TemporaryDirectory() as folder:
        corpus = numbered_corpus(Path(folder), lengths, documents_per_shard=9)
        loader = Loader(
            {"c": corpus}, sequence_length=first, global_batch_size=size, packing=rule, seed=1, **PER_STEP
        )
        total, tokens, padded = sum(lengths), {}, 0
        waits = [step for step, _ in changes]
        while max(tokens, default=0) < 2:
            while waits and waits[0] == 0:
                waits.pop(0)
                loader.set_sequence_length(changes[-len(waits) - 1][1])
            if waits:
                waits[0] -= 1
            batch = advance(loader)
            for row, pieces in zip(batch["input_ids"], loader.explain(batch["sample_ids"]), strict=True):
                epoch = pieces[0].epoch
                tokens.setdefault(epoch, Counter()).update(token for token in row.tolist() if token)
                padded += epoch == 0 and row[-1] == 0
        assert tokens[0] == tokens[1] == Counter(range(1, total + 1))
        pools = -(-total // choose_geometry(total, sequence_length=first).pool_tokens)
        assert padded <= pools, "only the last row of a pool may be short"


# Everything at once

CHANGES = st.one_of(
    st.tuples(st.just("weights"), st.integers(0, 9), st.integers(1, 9), st.integers(0, 9)),
    st.tuples(st.just("size"), st.sampled_from([4, 8, 12])),
    st.tuples(st.just("length"), ROW_LENGTHS),
    st.tuples(st.just("skip"), st.integers(0, 30), st.integers(1, 40)),
    st.tuples(st.just("skip steps"), st.integers(0, 5), st.integers(1, 3)),
    st.tuples(st.just("add"), st.integers(1, 9)),
    st.tuples(st.just("remove")),
)
ACTS = st.lists(
    st.one_of(
        CHANGES,
        st.tuples(st.just("run"), st.integers(1, 4)),
        st.tuples(st.just("move"), st.sampled_from([1, 2, 4]), st.sampled_from(["json", "pickle"])),
    ),
    min_size=3,
    max_size=14,
)


def tell(loader, change, corpora):
    """Tell a loader of a change; loaders that differ by a corpus of no weight are told the same."""
    kind, *values = change
    if kind in ("weights", "add"):
        weights = (
            dict(zip(("one", "two", "added"), values, strict=False)) if kind == "weights" else {"two": 2}
        )
        if kind == "add" and "added" not in loader.corpora:
            weights |= {"added": values[0], **dict.fromkeys(set(loader.corpora) - {"two"}, 0)}
            loader.add_corpus("added", corpora["added"], weights=weights)
        elif kind == "weights":
            weights = {name: weights[name] * (name != "one") for name in loader.corpora}
            loader.set_weights(weights)
    elif kind == "size":
        loader.set_global_batch_size(values[0])
    elif kind == "length":
        loader.set_sequence_length(values[0])
    elif kind == "skip":
        start = int(loader.samples_of(loader.step)[0]) + values[0]
        loader.skip(samples=range(start, start + values[1]))
    elif kind == "skip steps":
        first = loader.step + values[0]
        loader.skip(steps=range(first, first + values[1]))
    elif kind == "remove" and loader.weights["one"] and sum(map(bool, loader.weights.values())) > 1:
        loader.remove_corpus("one")


def moved(loaders, corpora, ranks, way, make):
    """Return loaders on another number of ranks, gone through JSON or pickle."""
    states = [json.dumps(loader.state_dict()) for loader in loaders]
    assert set(states) == {states[0]}, "the state is equal on all ranks"
    if way == "pickle":
        again = [pickle.loads(pickle.dumps(loader)) for loader in loaders]
        assert [json.dumps(loader.state_dict()) for loader in again] == states
        return again
    names = [name for name, weight in loaders[0].weights.items() if weight or name != "one"]
    fresh = [
        Loader({name: corpora[name] for name in names}, rank=rank, world_size=ranks, **make)
        for rank in range(ranks)
    ]
    for loader in fresh:
        loader.load_state_dict(json.loads(states[0]))
        assert json.dumps(loader.state_dict(), sort_keys=True) == json.dumps(
            json.loads(states[0]), sort_keys=True
        )
    return fresh


@given(LENGTHS, LENGTHS, LENGTHS, PACKINGS, ACTS, st.sampled_from([(), (3, 8, 5), (6, 12, 33)]))
@examples(25)
def test_any_changes_moves_and_ranks_serve_what_one_rank_serves_that_was_told_the_same(
    one, two, three, packing, acts, plan
):
    with tempfile.TemporaryDirectory() as folder:
        corpora = {
            name: numbered_corpus(Path(folder, name), lengths)
            for name, lengths in (("one", one), ("two", two), ("added", three))
        }
        schedule = [Change(step=plan[0], global_batch_size=plan[1], sequence_length=plan[2])] if plan else []
        make = {
            "sequence_length": 16,
            "global_batch_size": 4,
            **packing,
            "seed": 2,
            "schedule": schedule,
            **PER_STEP,
        }
        start = {name: corpora[name] for name in ("one", "two")}
        plain, loaders = Loader(start, **make), [Loader(start, **make)]
        for kind, *values in acts:
            if kind == "move":
                loaders = moved(loaders, corpora, *values, make)
            elif kind != "run":
                for loader in (plain, *loaders):
                    if kind != "remove" or "one" in loader.corpora:
                        tell(loader, (kind, *values), corpora)
            for _ in range(values[0] if kind == "run" else 1):
                expected = advance(plain)
                rows = {}
                for loader in loaders:
                    batch = advance(loader)
                    rows |= dict(
                        zip(
                            batch["sample_ids"].tolist(),
                            zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True),
                            strict=True,
                        )
                    )
                assert sorted(rows) == sorted(expected["sample_ids"].tolist())
                for sample, tokens, labels in zip(
                    expected["sample_ids"].tolist(), expected["input_ids"], expected["labels"], strict=True
                ):
                    assert rows[sample] == (tokens.tolist(), labels.tolist())


# Mixtures


@given(
    st.lists(
        st.tuples(
            st.integers(0, 30),
            st.lists(st.one_of(st.integers(0, 9), st.floats(0, 1)), min_size=4, max_size=4).filter(any),
            st.integers(2, 6),
        ),
        min_size=1,
        max_size=6,
    )
)
@examples(25)
def test_every_mixture_is_close_to_its_exact_shares_through_changes_of_length(changes):
    with tempfile.TemporaryDirectory() as folder:
        corpora = {f"c{i}": numbered_corpus(Path(folder, f"c{i}"), [5 + i]) for i in range(4)}
        loader = Loader(corpora, sequence_length=4, global_batch_size=7, **PER_STEP)
        first, counts = 0, np.zeros(4)
        for steps, weights, length in [(5, [5, 6, 7, 8], 4), *changes]:
            loader.set_sequence_length(length)
            loader.set_weights(dict(zip(corpora, weights, strict=True)))
            shares = np.array(list(loader.weights.values()))
            if not np.array_equal(shares, getattr(loader, "_shares_of_test", None)):
                first, counts = loader.step * 7, np.zeros(4)
                loader._shares_of_test = shares
            small = sum(loader.state_dict()["mix"][-1][1][i][1] for i in range(4)) <= 2**17
            for _ in range(steps):
                for corpus in loader.corpora_of(np.sort(loader.samples_of(loader.step))).tolist():
                    counts[corpus] += 1
                    assert (abs(counts - counts.sum() * shares) < (1 if small else 2)).all()
                advance(loader)
            assert counts.sum() == loader.step * 7 - first
            assert sum(loader.samples_by_corpus(loader.step).values()) == loader.step * 7


# Skips


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=6),
    st.integers(1, 5),
)
@examples(25)
def test_what_is_served_is_every_sample_but_those_skipped_and_the_past_stays(skips, size):
    with tempfile.TemporaryDirectory() as folder:
        corpus = numbered_corpus(Path(folder), [7] * 30)
        loader = Loader({"c": corpus}, sequence_length=8, global_batch_size=size, **PER_STEP)
        seen, left_out = [], set()
        for steps, ahead, count in skips:
            seen += [advance(loader)["sample_ids"].tolist() for _ in range(steps)]
            start = int(loader.samples_of(loader.step)[0]) + ahead
            loader.skip(samples=range(start, start + count), reason="spike")
            left_out |= set(range(start, start + count))
            assert [loader.batch_at(step)["sample_ids"].tolist() for step in range(loader.step)] == seen
            again = Loader({"c": corpus}, sequence_length=8, global_batch_size=size, **PER_STEP)
            again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
            again.skip(samples=range(start, start + count), reason="spike")
            assert again.state_dict() == loader.state_dict(), "to skip again changes nothing"
        while not seen or max(seen[-1]) <= max(left_out):
            seen.append(advance(loader)["sample_ids"].tolist())
        flat = sorted(sample for batch in seen for sample in batch)
        assert flat == [sample for sample in range(flat[-1] + 1) if sample not in left_out]
        untold = Loader({"c": corpus}, sequence_length=8, global_batch_size=size, **PER_STEP)
        there, here = (of.gather(range(flat[-1]))["input_ids"] for of in (untold, loader))
        assert np.array_equal(there, here), "a skip changes what no sample holds"
        assert loader.samples_by_corpus(loader.step) == {"c": len(flat)}
        skipped = loader.state_dict()["skip"]
        assert all(early[1] < late[0] for early, late in pairwise(skipped))
        assert {sample for start, stop, _ in skipped for sample in range(start, stop)} == left_out
        assert {reason for *_, reason in skipped} == {"spike"}


# Growth

PARTS = st.lists(
    st.lists(st.integers(0, 60), min_size=1, max_size=20).filter(lambda part: sum(part) > 0),
    min_size=2,
    max_size=5,
)


@given(PARTS, RULES, st.lists(st.integers(0, 30), min_size=4, max_size=4), st.booleans(), ROW_LENGTHS)
@examples(25)
def test_what_is_appended_is_read_once_before_any_second_pass_over_it(parts, rule, waits, saves, other):
    with tempfile.TemporaryDirectory() as folder:
        corpus = numbered_corpus(Path(folder), parts[0])
        make = {"sequence_length": 8, "global_batch_size": 1, "packing": rule, **PER_STEP}
        loader, count = Loader({"c": corpus}, **make), Counter()
        for part, steps in zip(parts[1:], waits, strict=False):
            for _ in range(steps):
                count.update(served(advance(loader)))
            grow(corpus, part)
            if saves:
                state = json.loads(json.dumps(loader.state_dict()))
                loader = Loader({"c": corpus}, **make)
                loader.load_state_dict(state)
            loader.extend_corpus("c")
            loader.set_sequence_length(other)
        total = sum(map(sum, parts))
        before = dict(count)
        for _ in range(10 * total):
            if len(count) == total:
                break
            count.update(served(advance(loader)))
        assert set(count) == set(range(1, total + 1))
        late = [token for token in range(sum(parts[0]) + 1, total + 1) if token not in before]
        assert all(count[token] == 1 for token in late)


@given(PARTS, RULES, ROW_LENGTHS, st.data())
@examples(25)
def test_ranks_that_see_a_streamed_corpus_at_other_moments_serve_the_same(parts, rule, other, data):
    """Parts appear just before the early rank needs them; the late rank opens the finished corpus."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = streamed_corpus(Path(folder), parts[0])
        make = {"sequence_length": 8, "global_batch_size": 2, "packing": rule, **PER_STEP}
        early, told, states, rows, waiting = Loader({"c": corpus}, **make), [], [], [], parts[1:]
        ready = sum(parts[0])
        total, count = sum(map(sum, parts)), Counter()
        while len(count) < total or len(rows) < 12:
            # Padding ends each part and each change: leave room for it.
            while waiting and sum(count.values()) + 4 * other + 4 * 8 > ready:
                ready += sum(waiting[0])
                grow(corpus, waiting.pop(0))
                if not waiting:
                    finish(corpus)
            if len(told) < 3 and data.draw(st.booleans(), label="change of length"):
                told.append((early.step, data.draw(st.sampled_from([8, other]))))
                early.set_sequence_length(told[-1][1])
            states.append(early.state_dict())
            batch = advance(early)
            rows.append(batch["input_ids"].tolist())
            if len(count) < total:
                count.update(served(batch))
                assert len(count) == total or max(count.values()) == 1, "once each before a second pass"
        late = Loader({"c": corpus}, **make)
        for step, expected in enumerate(rows):
            for at, length in told:
                if at == step:
                    late.set_sequence_length(length)
            assert late.state_dict() == states[step]
            again = Loader({"c": corpus}, **make)
            again.load_state_dict(json.loads(json.dumps(states[step])))
            assert again.batch_at(step)["input_ids"].tolist() == expected
            assert advance(late)["input_ids"].tolist() == expected


# what is counted


@given(
    LENGTHS, PACKINGS, ROW_LENGTHS, st.lists(st.integers(1, 12), max_size=3), st.booleans(), st.integers(0, 3)
)
@examples(25)
def test_padding_is_counted_as_it_is_served(lengths, packing, other, waits, skips, seed):
    with tempfile.TemporaryDirectory() as folder:
        corpora = {
            "c": numbered_corpus(Path(folder, "c"), lengths, documents_per_shard=9),
            "d": numbered_corpus(Path(folder, "d"), [40, 0, 3]),
        }
        make = {"sequence_length": 8, "global_batch_size": 4, "weights": {"c": 3, "d": 1}, "seed": seed}
        loader = Loader(corpora, **make, **packing, **PER_STEP)
        padding, counted = Counter(), []

        def run(steps):
            for _ in range(steps):
                rows = advance(loader)
                for sample, tokens in zip(rows["sample_ids"], rows["input_ids"], strict=True):
                    padding["cd"[int(loader.corpora_of(sample[None])[0])]] += int((tokens == 0).sum())
                counted.append({name: padding[name] for name in "cd"})

        for wait in waits:
            run(wait)
            loader.set_sequence_length(other if loader.sequence_length == 8 else 8)
            loader.set_weights({"c": wait, "d": 1})
            if skips:
                first = int(loader.samples_of(loader.step)[0]) + 3
                loader.skip(samples=range(first, first + wait))
        run(20)
        assert [loader.padding_by_corpus(step) for step in range(1, loader.step + 1)] == counted
        assert len(loader.length_changes()) == (len(waits) if other != 8 else 0)


# explain and find


def explained_uses(loader, documents, steps):
    """Return what explain says of some steps, each piece held against the tokens that are served."""
    uses = Counter()
    for step in steps:
        samples = loader.samples_of(step)
        tokens = loader.gather(samples)["input_ids"]
        for row, pieces in enumerate(loader.explain(samples)):
            at = 0
            for piece in pieces:
                if piece.corpus:
                    begin = int(np.cumsum([1, *documents[piece.corpus]])[piece.document]) + piece.offset
                    expected = list(range(begin, begin + piece.tokens))
                    assert tokens[row, at : at + piece.tokens].tolist() == expected
                    use = (step, row, int(samples[row]), piece.epoch, piece.offset, piece.tokens)
                    uses[piece.corpus, piece.document, *use] += 1
                at += piece.tokens
            assert at == tokens.shape[1]
    return uses


@given(
    LENGTHS, PACKINGS, ROW_LENGTHS, st.lists(st.integers(1, 12), max_size=3), st.booleans(), st.integers(0, 3)
)
@examples(25)
def test_find_is_the_inverse_of_explain_and_covers_each_document_once_an_epoch(
    lengths, packing, other, waits, skips, seed
):
    with tempfile.TemporaryDirectory() as folder:
        corpora = {
            "c": numbered_corpus(Path(folder, "c"), lengths, documents_per_shard=9),
            "d": numbered_corpus(Path(folder, "d"), [40, 0, 3]),
        }
        loader = Loader(
            corpora,
            weights={"c": 3, "d": 1},
            sequence_length=8,
            global_batch_size=4,
            **packing,
            seed=seed,
            **PER_STEP,
        )
        for wait in waits:
            for _ in range(wait):
                advance(loader)
            loader.set_sequence_length(other if loader.sequence_length == 8 else 8)
            loader.set_weights({"c": wait, "d": 1})
            if skips:
                first = int(loader.samples_of(loader.step)[0]) + 3
                loader.skip(samples=range(first, first + wait))
        steps, documents = 20, {"c": lengths, "d": [40, 0, 3]}
        explained = explained_uses(loader, documents, range(steps))
        found = Counter()
        for name in documents:
            for document in range(len(documents[name])):
                for use in loader.find(name, document, steps=range(steps)):
                    place = (use.step, use.row, use.sample, use.epoch, use.offset, use.tokens)
                    found[name, document, *place] += 1
        assert found == explained
