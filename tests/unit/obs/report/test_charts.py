"""Charts as numbers: few points, no spike lost, no average across a break, no text that ends a script."""

import json
import re

import numpy as np
import pytest

from penstock.obs.report.charts import Chart, Mark, charts_section, dots, line, smooth, thinned, window_for
from tests.unit.obs.html_elements import Elements, charts_of


def chart(*layers, **others):
    return Chart(key="c", title="Loss", description="It falls.", layers=layers, **others)


def noise(number):
    return np.arange(number, dtype=float), np.random.default_rng(number).normal(size=number)


@pytest.mark.parametrize("number", [601, 1000, 100_003])
def test_a_long_line_is_thinned_and_keeps_its_spike(number):
    steps, values = noise(number)
    values[number // 3] = 50.0
    drawn = line(steps, values, name="a", color=0)
    assert len(drawn.x) == 600
    assert (drawn.x[0], drawn.x[-1], drawn.y.max()) == (0, number - 1, 50.0)
    assert np.all(np.diff(drawn.x) > 0)


def test_means_are_of_all_steps_not_of_the_points_that_are_drawn():
    steps, values = noise(100_000)
    _, (_, x, y), _ = line(steps, values, name="a", color=0).means
    whole = smooth(values, window=window_for(len(values)))
    assert len(x) == 200
    assert y.tolist() == whole[x.astype(int)].tolist()
    assert abs(y).max() < 0.2, "2,001 values of deviation 1"


def test_a_short_line_is_left_as_it_is():
    drawn = line(np.array([1.0, 2.0]), np.array([5.0, 6.0]), name="a", color=0)
    assert (drawn.x.tolist(), drawn.y.tolist(), drawn.means) == ([1, 2], [5, 6], [])


def test_values_that_are_not_finite_are_left_out():
    x, y = thinned(np.arange(4.0), np.array([1.0, np.nan, np.inf, 2.0]), points=9)
    assert (x.tolist(), y.tolist()) == ([0, 3], [1, 2])


def test_the_means_of_a_compared_run_have_its_name_and_those_of_one_run_their_width():
    steps, values = noise(1000)
    assert {name for name, _, _ in line(steps, values, name="a", color=0, stays=False).means} == {"a"}
    names = [name for name, _, _ in line(steps, values, name="a", color=0).means]
    assert names == ["mean of 5 steps", "mean of 21 steps", "mean of 83 steps"]


def test_smoothing_a_straight_line_does_not_shift_it():
    straight = np.arange(50.0)
    assert smooth(straight, window=7)[3:-3] == pytest.approx(straight[3:-3])


def test_smoothing_does_not_reach_across_a_break():
    values = np.repeat([1.0, 5.0, 2.0], 10)
    assert smooth(values, window=7, breaks=[10, 20]).tolist() == values.tolist()


def test_smoothing_skips_what_is_not_a_number():
    assert smooth(np.array([1.0, np.nan, 3.0]), window=3).tolist() == [1.0, 2.0, 3.0]
    assert np.isnan(smooth(np.array([np.nan, np.nan]), window=3)).all()


@pytest.mark.parametrize("share", [200, 50, 12])
@pytest.mark.parametrize("number", [1, 7, 250, 10_000, 1_000_000])
def test_the_smoothing_window_is_odd_so_that_it_has_a_centre(number, share):
    assert window_for(number, share=share) % 2 == 1


def test_no_text_ends_the_script_or_becomes_markup():
    evil = '</script><script>alert("1")</script><!--&'
    drawn = chart(
        line(np.arange(9.0), np.arange(9.0), name=evil, color=0),
        dots(np.arange(9.0), np.arange(9.0), name=evil, color=1),
        marks=[Mark(3, evil, is_labelled=True)],
        levels=[(evil, 4.0)],
    )
    described = Chart(key="d", title=evil, description=evil, layers=drawn.layers)
    section = charts_section([drawn, described], label=evil)
    scripts = [attributes for tag, attributes in Elements(section).found if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "chart-data"}]
    assert "alert(&quot;1&quot;)" in section
    assert charts_of(section)["c"]["layers"][1]["name"] == evil
    assert charts_of(section)["d"]["title"] == evil
    assert "<!--" not in section


def test_a_page_without_scripts_has_the_charts_in_words():
    section = charts_section([chart(line(np.arange(9.0), np.arange(9.0), name="a", color=0))], label="Charts")
    assert "<li>It falls.</li>" in re.search('<div class="wide" id="in-words">(.*)</div>', section)[1]


def test_a_chart_without_points_is_left_out_and_a_page_of_none_has_no_section():
    empty = chart(line(np.arange(3.0), np.full(3, np.nan), name="a", color=0))
    assert charts_section([empty], label="Charts") == ""


def test_numbers_are_written_short_and_steps_exactly():
    x, y = np.array([1_234_567.0, 1_234_568.0]), np.array([1 / 3, 2e10])
    text = json.dumps(chart(dots(x, y, name="a", color=0)).as_json()["layers"][0])
    assert '"x": [1234567, 1234568], "y": [0.33333, 20000000000.0]' in text
