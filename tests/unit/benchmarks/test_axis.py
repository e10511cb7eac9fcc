"""Axes: every value has a place, ticks are few, round and told apart."""

import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from axis import axis_for, tick_labels

RANGES = [
    (0, 1), (2.9, 11.2), (6.12, 6.14), (0, 3e-4), (5, 5), (0, 0), (-3, 4), (1e9, 3e9), (0, 49_999),
    (1e-12, 2e-12), (0, 1e30), (7.0, 7.0000001),
]  # fmt: skip


@pytest.mark.parametrize("from_zero", [False, True])
@pytest.mark.parametrize(("low", "high"), RANGES)
def test_an_axis_shows_its_whole_range_with_ticks_that_differ(low, high, from_zero):
    axis = axis_for(low, high, from_zero=from_zero)
    assert axis.low <= low <= high <= axis.high
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 8
    assert len({label for _, label in ticks}) == len(ticks)
    assert all(axis.low - 1e-9 * abs(axis.low) <= value <= axis.high * (1 + 1e-9) for value, _ in ticks)


@pytest.mark.parametrize(("low", "high"), [(0.2, 30), (1e-3, 1e3), (1, 1), (3, 4), (1e-9, 1e9)])
def test_a_log_axis_shows_its_whole_range_in_round_ticks(low, high):
    axis = axis_for(low, high, scale="log")
    assert 0 < axis.place(low) <= axis.place(high) < 1
    assert 1 <= len(axis.ticks()) <= 8


def test_a_range_from_zero_starts_at_zero():
    assert axis_for(40, 50, from_zero=True).low == 0


@pytest.mark.parametrize("value", [-math.inf, -1, 0, 3, 1e9, math.inf])
def test_a_place_is_never_outside_the_plot(value):
    for scale in ("linear", "log"):
        assert 0 <= axis_for(1, 10, scale=scale).place(value) <= 1


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ([0, 0.5, 1], ["0.0", "0.5", "1.0"]),
        ([6.1, 6.15], ["6.10", "6.15"]),
        ([0, 5e5, 1e6], ["0", "0.5M", "1.0M"]),
        ([0, 5e29], ["0", "5e29"]),
        ([], []),
    ],
)
def test_tick_labels_have_equal_and_just_enough_decimals(ticks, labels):
    assert tick_labels(ticks) == labels
