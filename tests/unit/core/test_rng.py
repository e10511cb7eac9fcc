"""Random numbers as functions: fixed for ever, and different wherever anything differs."""

import numpy as np
import pytest

from penstock.core.rng import key_of, mix64, shuffled


def test_keys_and_permutations_never_change_because_the_order_of_running_jobs_hangs_on_them() -> None:
    assert key_of(0, "blocks", "web", 1) == 14400521355824118938
    first, second, last = [16294208416658607535, 10451216379200822465, 16490336266968443936]
    assert mix64(np.array([0, 1, 2**64 - 1], dtype=np.uint64)).tolist() == [first, second, last]
    assert first == 0xE220A8397B1DCDAF, "the first output of SplitMix64 from 0, as others publish it"
    assert shuffled(10, 7).tolist() == [4, 2, 0, 9, 3, 8, 6, 5, 1, 7]


def test_a_key_depends_on_every_part_and_its_place_and_type() -> None:
    parts = [
        (0, "a", "b"),
        (0, "b", "a"),
        (0, "ab"),
        (0, "a", "b", ""),
        (1, "a", "b"),
        (-1, "a", "b"),
        (0, 1),
        (0, "1"),
        (0, 1, 2),
        (0, 12),
        (10, 2),
        (1, 0, 2),
        (0, "a\0str:b"),
    ]
    distinct = {key_of(seed, *names) for seed, *names in parts}  # type: ignore[misc]
    assert len(distinct) == len(parts) - 1, "only a name that contains the separator can imitate two"
    assert key_of(0, "a\0str:b") == key_of(0, "a", "b")


def test_seeds_and_epochs_do_not_add_up() -> None:
    keys = {key_of(seed, "blocks", "web", epoch) for seed in range(40) for epoch in range(40)}
    assert len(keys) == 1600


def test_mixing_is_a_bijection_and_flips_half_of_the_bits() -> None:
    values = np.arange(2**16, dtype=np.uint64)
    assert len(np.unique(mix64(values))) == 2**16
    flipped = np.bitwise_count(mix64(values) ^ mix64(values ^ np.uint64(1)))
    assert flipped.mean() == pytest.approx(32, abs=0.1)


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1])
def test_a_shuffle_is_a_permutation_for_any_key(n: int, key: int) -> None:
    order = shuffled(n, key)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))


@pytest.mark.parametrize(("n", "key"), [(4095, 7), (2**17, 8200 << 17)])  # two keys of the second are close
def test_a_shuffle_is_the_order_of_whole_keys(n: int, key: int) -> None:
    keys = mix64(np.arange(n, dtype=np.uint64) ^ np.uint64(key))
    shuffled_keys = keys[shuffled(n, key)]
    assert (shuffled_keys[1:] > shuffled_keys[:-1]).all()


def test_every_place_of_a_shuffle_gets_every_value_about_equally_often() -> None:
    counts = np.zeros((6, 6))
    for index in range(6000):
        counts[np.arange(6), shuffled(6, key_of(index, "uniform"))] += 1
    assert np.abs(counts - 1000).max() < 6 * np.sqrt(1000 * 5 / 6), "6 sigma of a binomial count"
