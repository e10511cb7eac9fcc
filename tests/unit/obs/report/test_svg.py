"""Charts: inside the plot, well formed, described, and safe against the text they are given."""

import json
import re

import numpy as np
import pytest

from penstock.obs.report.series import shrink
from penstock.obs.report.svg import Chart, Layer, Mark, axis_for_steps, draw, read_out, rows_of_labels
from tests.unit.obs.html_elements import Elements


def layer(values, *, style="raw", first=1):
    steps = np.arange(first, first + len(values), dtype=float)
    return Layer(name="training", series=shrink(steps, np.array(values, dtype=float)), style=style)


def chart(*layers, **others):
    return Chart(key="c", title="Loss", description="It falls.", layers=layers, last_step=10, **others)


def test_a_chart_is_an_image_with_a_title_and_a_description():
    elements = Elements(draw(chart(layer([3, 2, 1])))).found
    image = next(attributes for tag, attributes in elements if attributes.get("role") == "img")
    ids = {attributes["id"] for _, attributes in elements if "id" in attributes}
    assert set(image["aria-labelledby"].split()) <= ids
    assert "<desc id=" in draw(chart(layer([3, 2, 1])))


@pytest.mark.parametrize("number", [1, 2, 400, 5000])
@pytest.mark.parametrize("style", ["raw", "smooth", "dots"])
def test_lines_stay_inside_the_plot(number, style):
    one = layer(np.random.default_rng(0).normal(size=number), style=style)
    text = draw(Chart(key="c", title="t", description="d", layers=[one], last_step=number))
    paths = re.findall(r' d="([^"]+)"', text)
    assert paths
    numbers = [float(part) for path in paths for part in re.findall(r"[\d.-]+", path)]
    assert all(0 <= number <= 1000 for number in numbers)


def test_a_long_series_has_a_band_and_a_short_one_has_none():
    assert 'class="band"' in draw(chart(layer(range(5000))))
    assert 'class="band"' not in draw(chart(layer(range(50))))


def test_text_is_escaped_wherever_it_is_drawn():
    evil = '</script><script>alert("1")</script>&'
    drawn = draw(
        Chart(
            key="c",
            title=evil,
            description=evil,
            layers=[
                Layer(name=evil, series=shrink(np.arange(9.0), np.arange(9.0)), style=s)
                for s in ("raw", "dots")
            ],
            last_step=9,
            marks=[Mark(step=3, text=evil, is_labelled=True), Mark(step=4, text=evil, is_labelled=False)],
            levels=[(evil, 4.0)],
        )
    )
    scripts = [attributes for tag, attributes in Elements(drawn).found if tag == "script"]
    assert scripts == [{"type": "application/json"}]
    assert "alert(&quot;1&quot;)" in drawn


def test_the_read_out_has_every_point_with_its_step_and_value():
    found = json.loads(read_out(chart(layer([3.25, 2.5], first=1500)), axis_for_steps(0, 3000)))
    assert found == [
        {
            "name": "training",
            "style": "raw",
            "at": [0.5, 0.5003],
            "steps": ["1,500", "1,501"],
            "values": ["3.250", "2.500"],
            "classes": "raw",
            "y": [3.25, 2.5],
        }
    ]


def test_the_read_out_of_a_bucket_tells_its_range():
    found = json.loads(read_out(chart(layer(range(800))), axis_for_steps(0, 800)))
    assert [found[0][name][0] for name in ("low", "y", "high")] == [0.0, 0.5, 1.0]


def test_a_level_outside_the_values_widens_the_axis():
    drawn = draw(chart(layer([1.0, 2.0]), levels=[("entropy", 9.0)]))
    heights = [float(y) for y in re.findall(r'class="level" data-value="9" x2="100%" y1="([\d.]+)%"', drawn)]
    assert len(heights) == 1
    assert 0 < heights[0] < 20


def test_labels_that_would_overlap_have_rows_of_their_own():
    marks = [Mark(step=step, text="2 → 3 processes", is_labelled=True) for step in (10, 11, 90)]
    rows = rows_of_labels(marks, axis_for_steps(0, 100))
    assert rows[marks[0]] != rows[marks[1]]
    assert len(rows) == 3


def test_labels_beyond_the_rows_are_left_to_the_tooltip():
    marks = [Mark(step=50 + step, text="2 → 3 processes", is_labelled=True) for step in range(20)]
    assert len(rows_of_labels(marks, axis_for_steps(0, 100))) == 4
    assert draw(chart(layer([1, 2]), marks=marks)).count("<title>") == 16
