"""Permutations are bijections at every size; mixtures hold their shares at every sample."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.core.rng import key_of, shuffled
from penstock.data.order.permutation import Permutation, choose_geometry
from penstock.data.order.row_order import Order
from penstock.data.packing import PACKERS
from penstock.data.schedule.mixture import UNITS, mixture_of, slots_of, tijdeman
from tests.examples import examples
from tests.property.strategies import RULES


@pytest.mark.parametrize("sizes", [range(1, 600), range(1000, 5001, 37)])
def test_block_permutation_is_a_bijection_at_every_size(sizes):
    for n in sizes:
        assert np.array_equal(np.sort(Permutation(n, key=n * 7)(np.arange(n))), np.arange(n)), n


@pytest.mark.parametrize("power", range(1, 18))
def test_block_permutation_is_a_bijection_around_powers_of_two(power):
    for n in (2**power - 1, 2**power, 2**power + 1):
        assert np.array_equal(np.sort(Permutation(n, key=n)(np.arange(n))), np.arange(n)), n


@given(st.integers(2**40, 10**14), st.integers(0, 2**64 - 1))
def test_block_permutation_stays_in_a_huge_domain_without_collisions(n, key):
    images = Permutation(n, key=key)(np.arange(2000))
    assert images.min() >= 0
    assert images.max() < n
    assert len(set(images.tolist())) == 2000


def test_epochs_differ_in_block_document_and_row_order():
    for n in (50, 1000, 4096):
        orders = [Permutation(n, key=key_of(0, "blocks", "web", e))(np.arange(n)).tolist() for e in range(5)]
        assert len({tuple(order) for order in orders}) == 5
        orders = [shuffled(n, key_of(0, "rows", "web", e)).tolist() for e in range(5)]
        assert len({tuple(order) for order in orders}) == 5


def test_permutation_leaks_neither_parity_nor_residues():
    """A multiply-add round lets whole windows be odd or even; the counts here are 6 sigma bounds."""
    n = 2**16
    images = Permutation(n, key=3)(np.arange(n))
    for modulus in (2, 3, 4, 8):
        for window in images.reshape(64, -1):
            counts = np.bincount(window % modulus, minlength=modulus)
            expected = len(window) / modulus
            assert np.abs(counts - expected).max() < 6 * np.sqrt(expected)
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 6 / np.sqrt(n)


@given(st.integers(1, 200_000), st.integers(2, 64))
@examples(200)
def test_sample_indices_map_one_to_one_to_pools_and_rows(num_tokens, sequence_length):
    order = Order(num_tokens, choose_geometry(num_tokens, sequence_length=sequence_length), name="c", seed=1)
    count = order.samples_per_epoch
    places = order.locate(np.arange(2 * count))
    assert places.epoch.tolist() == [0] * count + [1] * count
    for epoch in (0, 1):
        chosen = places.epoch == epoch
        found = sorted(zip(places.pool[chosen].tolist(), places.row[chosen].tolist(), strict=True))
        assert found == [(p, r) for p in range(order.num_pools) for r in range(order.rows_in_pool(p))]
        ranges = sorted(r for pool in range(order.num_pools) for r in order.blocks.of_pool(epoch, pool))
        assert ranges[0][0] == 0
        assert ranges[-1][1] == num_tokens
        assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=120),
    st.integers(2, 64),
    RULES,
)
@examples(300)
def test_packing_conserves_tokens_and_fills_every_row_but_the_last(lengths, sequence_length, rule):
    lengths = np.array(lengths)
    rows = -(-int(lengths.sum()) // sequence_length)
    pieces = PACKERS[rule](lengths, num_rows=rows, sequence_length=sequence_length)
    by_fragment = sorted(
        zip(pieces.fragment.tolist(), pieces.offset.tolist(), pieces.length.tolist(), strict=True)
    )
    covered = [(f, o + k) for f, o, length in by_fragment for k in range(length)]
    assert covered == [(f, k) for f, length in enumerate(lengths.tolist()) for k in range(length)]
    filled = [int(row.sum()) for row in np.split(pieces.length, pieces.row_ends[:-1])]
    assert filled[:-1] == [sequence_length] * (rows - 1)
    assert len(filled) == rows


def test_best_fit_splits_far_fewer_documents_than_concat():
    lengths = np.clip(np.random.default_rng(0).lognormal(6.3, 1.2, 4000).astype(np.int64), 1, 100_000)
    rows = -(-int(lengths.sum()) // 4096)
    could_stay_whole = np.flatnonzero(lengths <= 4096)
    split = {}
    for rule in ("concat", "best_fit"):
        pieces = PACKERS[rule](lengths, num_rows=rows, sequence_length=4096)
        split[rule] = int((np.bincount(pieces.fragment)[could_stay_whole] > 1).sum())
    assert split["best_fit"] * 5 < split["concat"]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any))
@examples(200)
def test_every_prefix_of_a_mixture_is_within_one_sample_of_its_shares(slots):
    pattern = tijdeman(tuple(slots))
    total = sum(slots)
    steps = np.arange(1, 2 * total + 1)
    for corpus, count in enumerate(slots):
        taken = np.cumsum(np.tile(pattern, 2) == corpus)
        assert np.abs(taken - steps * count / total).max() < 1


@given(
    st.dictionaries(st.text(min_size=1, max_size=4), st.floats(0, 1e6), min_size=1, max_size=30).filter(
        lambda weights: sum(weights.values()) > 0
    )
)
@examples(100)
@example({"0": 1.0, "00": 116.99999999988358})
def test_weights_become_slots_within_one_of_their_share(weights):
    slots = slots_of(weights)
    total, bound = sum(slots.values()), Fraction(len(weights), UNITS)
    assert total <= UNITS
    assert all((slots[name] > 0) == (weight > 0) for name, weight in weights.items())

    def is_near(meant):
        whole = sum(meant.values())
        return all(
            abs(Fraction(slots[name], total) - share / whole) <= bound for name, share in meant.items()
        )

    exact = {name: Fraction(weight) for name, weight in weights.items()}
    rounded = {name: Fraction(round(1000 * weight), 1000) for name, weight in weights.items()}
    are_decimals = all(abs(rounded[name] - share) <= share / 10**12 for name, share in exact.items())
    assert is_near(exact) or (are_decimals and is_near(rounded))


WEIGHTS = st.one_of(st.floats(1e-12, 1), st.integers(0, 40).map(lambda n: 0.618**n), st.floats(1e-3, 1e9))


@given(st.lists(WEIGHTS, min_size=2, max_size=40), st.integers(0, 2**50))
@examples(200)
def test_every_prefix_is_within_two_samples_of_the_exact_shares_of_any_weights(weights, start):
    mixture = mixture_of(slots_of({str(index): weight for index, weight in enumerate(weights)}))
    shares = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    for first in (0, start):
        counts = mixture.counts(first)
        corpora, turns = mixture.locate(np.arange(first, first + 400))
        for sample, corpus, turn in zip(
            range(first, first + 400), corpora.tolist(), turns.tolist(), strict=True
        ):
            assert turn == counts[corpus]
            counts[corpus] += 1
            if sample % 16 == 0:
                assert mixture.sample_of(corpus, turn) == sample
            for count, share in zip(counts, shares, strict=True) if sample % 8 == 0 else ():
                assert abs(count - (sample + 1) * share) < 2


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 10**13))
def test_mixture_turns_count_up_one_by_one_from_any_sample(slots, start):
    mixture = mixture_of({str(index): count for index, count in enumerate(slots)})
    samples = np.arange(start, start + 500)
    corpora, turns = mixture.locate(samples)
    for corpus in set(corpora.tolist()):
        mine = turns[corpora == corpus]
        assert (np.diff(mine) == 1).all()
        for sample, turn in list(zip(samples[corpora == corpus].tolist(), mine.tolist(), strict=True))[:3]:
            assert mixture.sample_of(corpus, turn) == sample
