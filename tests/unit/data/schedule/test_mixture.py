"""Weights to slots, samples to corpora: exact at any size (shares at each sample: property tests)."""

import math

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.data.schedule.mixture import UNITS, Pattern, Tree, mixture_of, slots_of, tijdeman


def test_slots_are_the_largest_remainders_and_the_first_name_breaks_ties() -> None:
    tenth = 0.1 / 2**70  # three shares of it and the rest: beyond what 2**62 can tell
    slots = slots_of({"rest": 1 - 3 * tenth, "b": tenth, "a": tenth, "c": tenth})
    assert slots == {"rest": UNITS - 3, "b": 1, "a": 1, "c": 1}
    assert slots_of({"b": 1 / 3, "a": 1 / 3, "c": 1 / 3}) == {"b": 1, "a": 1, "c": 1}


def test_only_the_proportions_of_weights_matter() -> None:
    assert slots_of({"a": 7, "b": 3}) == slots_of({"a": 0.7, "b": 0.3}) == slots_of({"a": 7e12, "b": 3e12})
    assert slots_of({"a": 5}) == {"a": 1}
    assert slots_of({"a": 6, "b": 2}) == {"a": 3, "b": 1}


def test_a_weight_of_zero_gives_no_slot_and_any_other_at_least_one() -> None:
    slots = slots_of({"huge": 1e12, "tiny": 1e-9, "none": 0})
    assert slots == {"huge": UNITS - 1, "tiny": 1, "none": 0}


def test_many_tiny_weights_are_paid_for_by_the_largest() -> None:
    slots = slots_of({"huge": 1e12} | {f"tiny-{i}": 1e-9 for i in range(1000)})
    assert slots["huge"] == UNITS - 1000
    assert sum(slots.values()) == UNITS


@pytest.mark.parametrize("weight", [-1, -0.5, math.nan, math.inf, -math.inf])
def test_a_weight_that_is_no_share_is_refused_with_its_corpus(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"Weight of corpus 'b' must be zero or more \(got "):
        slots_of({"a": 1, "b": weight})


def test_weights_that_are_all_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights sum to zero .*Give one corpus a weight above 0"):
        slots_of({"a": 0, "b": 0.0})


def test_the_pattern_is_fixed_for_ever_because_running_jobs_hang_on_it() -> None:
    assert tijdeman((3, 2, 1)).tolist() == [0, 1, 0, 2, 1, 0]
    assert tijdeman((1, 0, 1)).tolist() == [0, 2]
    assert tijdeman((4,)).tolist() == [0, 0, 0, 0]


MIXTURES = [{"a": 70, "b": 0, "c": 29, "d": 1}, {"a": 70 * 2**53 - 1, "b": 0, "c": 29 * 2**53, "d": 2**53}]
"""A pattern and a tree."""


@pytest.mark.parametrize("slots", MIXTURES)
@pytest.mark.parametrize("start", [0, 65_530, 10**13 - 3, 2 * 10**15])
def test_samples_and_turns_are_inverse_at_any_size(slots: dict[str, int], start: int) -> None:
    mixture = mixture_of(slots)
    samples = np.arange(start, start + 1000)
    corpora, turns = mixture.locate(samples)
    back = [mixture.sample_of(c, t) for c, t in zip(corpora.tolist(), turns.tolist(), strict=True)]
    assert back == samples.tolist()
    assert 1 not in corpora


@pytest.mark.parametrize("slots", MIXTURES)
@pytest.mark.parametrize("start", [0, 99, 10**13 + 1])
def test_counts_are_how_many_samples_each_corpus_has_had(slots: dict[str, int], start: int) -> None:
    mixture = mixture_of(slots)
    before, after = mixture.counts(start), mixture.counts(start + 250)
    corpora, turns = mixture.locate(np.arange(start, start + 250))
    assert sum(before) == start
    assert np.subtract(after, before).tolist() == np.bincount(corpora, minlength=4).tolist()
    for corpus in (0, 2, 3):
        mine = turns[corpora == corpus]
        assert mine.tolist() == list(range(before[corpus], after[corpus]))


def test_weights_of_three_decimals_are_met_exactly_by_a_short_pattern() -> None:
    assert slots_of({"a": 0.333, "b": 0.667}) == {"a": 333, "b": 667}
    assert slots_of({"a": 0.6, "b": 0.4}) == {"a": 3, "b": 2}


def test_a_mixture_of_a_saved_state_is_a_pattern_and_any_other_a_tree() -> None:
    assert isinstance(mixture_of({"a": 40_000, "b": 25_536}), Pattern)
    assert isinstance(mixture_of({"a": 2**17, "b": 1}), Tree)
    assert isinstance(mixture_of(slots_of({"a": math.pi, "b": math.e})), Tree)


def test_the_tree_is_fixed_for_ever_because_running_jobs_hang_on_it() -> None:
    mixture = mixture_of({"a": 3 * 10**9, "b": 10**9 + 1, "c": 2 * 10**9})
    assert "".join("abc"[corpus] for corpus in mixture.locate(np.arange(24))[0]) == "cabacacabacacabacacabaca"


@pytest.mark.parametrize("weight", [1e-6, 1e-9, 2.5e-7])
def test_a_weight_far_below_a_thousandth_is_served_as_often_as_it_says(weight: float) -> None:
    mixture = mixture_of(slots_of({"web": 1 - weight, "rare": weight}))
    for samples in (10**5, 10**7, 10**12):
        assert abs(mixture.counts(samples)[1] - samples * weight) < 2


def test_shares_by_tokens_pass_over_every_corpus_equally_often() -> None:
    tokens = {"web": 15 * 10**12, "small": 32 * 10**6}
    counts = mixture_of(slots_of(tokens)).counts(sum(tokens.values()) // 4096)
    passes = [count * 4096 / size for count, size in zip(counts, tokens.values(), strict=True)]
    assert passes == pytest.approx([1, 1], abs=1e-3)


def test_a_sample_takes_few_products_whatever_the_weights_of_500_corpora() -> None:
    for ratio in (1.0, 0.97, 0.5):
        mixture = mixture_of(slots_of({str(n): math.pi * ratio**n for n in range(500)}))
        assert isinstance(mixture, Pattern) or mixture.products_per_sample < 1 + math.log2(500)
