"""The mixture of a run as a chart: exact shares, few points, nothing in a name can become markup."""

import json
import re

import pytest

from penstock.obs.report.history import gather
from penstock.obs.report.stacked_areas import mixture_chart
from tests.unit.obs.html_elements import Elements


def records(steps, *, shares, changes=()):
    """A run of 100 tokens a step; `shares(step)` is tokens of a step by corpus."""
    totals = {}
    for step in range(1, steps + 1):
        if step in changes:
            yield {
                "event": "mixture",
                "step": step,
                "tokens": 100 * (step - 1),
                "weights": {},
                "reason": "<b>",
            }
        totals = {name: totals.get(name, 0) + tokens for name, tokens in shares(step).items()}
        yield {"step": step, "tokens": 100 * step, "loss": 1.0, "corpus_tokens": totals}


def half_then_all(step):
    return {"web": 50, "<i>": 50} if step <= 40 else {"web": 100, "<i>": 0}


def read_out(chart):
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', chart)[1])


def test_the_areas_are_what_was_served_and_changes_are_marked():
    chart = mixture_chart(gather(records(80, shares=half_then_all, changes=(41,))))
    web, other = read_out(chart)
    assert (web["name"], other["name"]) == ("web", "<i>")
    assert (web["values"][39], web["values"][40], other["values"][-1]) == ("50%", "100%", "0%")
    assert chart.count('class="mark quiet"') == 1
    assert 'x1="50.00%"' in chart
    assert "The mixture changed 1 time." in chart
    assert "<i>" not in re.sub(r"<i class=", "", chart)
    assert "<b>" not in chart
    tags = [tag for tag, _ in Elements(chart).found]
    assert tags.count("path") == 2


@pytest.mark.parametrize("steps", [1, 399, 400, 401, 5003])
def test_any_run_is_drawn_with_few_points_that_end_at_its_last_step(steps):
    history = gather(records(steps, shares=lambda step: {"a": 40 + step % 2, "b": 60 - step % 2}))
    assert len(history.mixture) <= 401
    assert history.mixture[-1].step == steps
    (a, _) = read_out(mixture_chart(history))[::-1]
    assert a["at"][-1] == 1.0


def test_one_corpus_has_no_chart_and_many_are_drawn_as_the_largest_and_the_others():
    assert mixture_chart(gather(records(9, shares=lambda _: {"web": 100}))) == ""
    chart = mixture_chart(gather(records(9, shares=lambda _: {f"c{i}": i + 1 for i in range(13)})))
    layers = read_out(chart)
    assert [layer["name"] for layer in layers][:2] == ["c12", "c11"]
    assert len(layers) == 8
    assert layers[-1]["name"] == "others"
    assert layers[-1]["values"][0] == "23.1%"


def test_hundreds_of_changes_are_thinned():
    history = gather(records(999, shares=half_then_all, changes=range(2, 999)))
    assert mixture_chart(history).count("mark quiet") <= 100
