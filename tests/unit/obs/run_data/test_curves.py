"""Curves as a page draws them: thinned points, and the means of the records around each."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.obs.run_data.columns import RunData
from penstock.obs.run_data.curves import sampled
from tests.examples import examples
from tests.run_records import MemoryFiles


def data(values, **others):
    columns = {"step": np.arange(1.0, len(values) + 1), "loss": np.array(values, dtype=float), **others}
    return RunData(files=MemoryFiles(b""), tables={"steps": columns, "validations": {}, "tasks": {}})


@given(st.lists(st.integers(-9, 9) | st.just(np.nan), min_size=101, max_size=400))
@examples(100)
def test_a_mean_is_of_the_records_nearest_to_its_point_and_none_is_left_out(values):
    found = sampled(data(values), ["loss"], "step", points=100)
    steps = np.arange(1, len(values) + 1)
    later_first = found.x[::-1]  # a record halfway between two points counts for the later one
    nearest = np.abs(steps[:, None] - later_first).argmin(axis=1) if len(later_first) else np.empty(0)
    for place, mean in enumerate(found.means["loss"][::-1]):
        own = np.array(values)[nearest == place]
        assert mean == pytest.approx(own[np.isfinite(own)].mean(), abs=1e-9)


def test_means_are_level_where_thinned_points_are_extremes():
    values = np.random.default_rng(0).normal(size=100_000)
    found = sampled(data(values), ["loss"], "step", points=600)
    assert abs(found.series["loss"]).mean() > 2, "thinning prefers extremes"
    assert abs(found.means["loss"]).mean() < 0.2


def test_nothing_is_averaged_where_no_record_is_left_out():
    assert sampled(data([3.0, 2.0]), ["loss"], "step", points=3).means == {}


def test_the_last_record_before_a_kept_step_stays():
    found = sampled(data(np.zeros(10_000)), ["loss"], "step", points=50, kept_steps=[4321.5, 0.0])
    assert 4321 in found.x
    assert len(found.x) <= 52


def test_a_metric_without_a_value_has_no_points():
    found = sampled(data(np.full(5000, np.nan)), ["loss"], "step", points=50)
    assert (len(found.x), len(found.means["loss"])) == (0, 0)
