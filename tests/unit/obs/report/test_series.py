"""Shrinking and smoothing: few points, no spike lost, no lag, no average across a break."""

import numpy as np
import pytest

from penstock.obs.report.series import shrink, smooth, window_for


@pytest.mark.parametrize("number", [401, 799, 1000, 100_003])
def test_a_long_series_shrinks_to_the_limit_and_keeps_its_extremes(number):
    values = np.random.default_rng(number).normal(size=number)
    values[number // 3] = 50.0
    series = shrink(np.arange(number, dtype=float), values, limit=400)
    assert len(series.steps) == 400
    assert series.is_bucketed
    assert (series.low.min(), series.high.max()) == (values.min(), 50.0)
    assert np.all(series.low <= series.mean)
    assert np.all(series.mean <= series.high)
    assert np.all(np.diff(series.steps) > 0)


def test_a_short_series_is_left_as_it_is():
    series = shrink(np.array([1.0, 2.0]), np.array([5.0, 6.0]))
    assert (series.steps.tolist(), series.mean.tolist()) == ([1, 2], [5, 6])
    assert not series.is_bucketed


def test_values_that_are_not_finite_are_left_out():
    series = shrink(np.arange(4.0), np.array([1.0, np.nan, np.inf, 2.0]))
    assert (series.steps.tolist(), series.mean.tolist()) == ([0, 3], [1, 2])


def test_smoothing_a_straight_line_does_not_shift_it():
    line = np.arange(50.0)
    assert smooth(line, window=7)[3:-3] == pytest.approx(line[3:-3])


def test_smoothing_does_not_reach_across_a_break():
    values = np.repeat([1.0, 5.0, 2.0], 10)
    assert smooth(values, window=7, breaks=[10, 20]).tolist() == values.tolist()


def test_smoothing_skips_what_is_not_a_number():
    assert smooth(np.array([1.0, np.nan, 3.0]), window=3).tolist() == [1.0, 2.0, 3.0]
    assert np.isnan(smooth(np.array([np.nan, np.nan]), window=3)).all()


@pytest.mark.parametrize("number", [1, 7, 250, 10_000, 1_000_000])
def test_the_smoothing_window_is_odd_so_that_it_has_a_centre(number):
    assert window_for(number) % 2 == 1
