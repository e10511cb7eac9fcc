"""The mixture of a run as a chart: exact shares, few points."""

import pytest

from penstock.obs.report.run_charts import mixture_chart
from tests.run_records import gather


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
                "reason": "why",
            }
        totals = {name: totals.get(name, 0) + tokens for name, tokens in shares(step).items()}
        yield {"step": step, "tokens": 100 * step, "loss": 1.0, "corpus_tokens": totals}


def half_then_all(step):
    return {"web": 50, "code": 50} if step <= 40 else {"web": 100, "code": 0}


def test_the_areas_are_what_was_served_and_changes_are_marked():
    chart = mixture_chart(gather(records(80, shares=half_then_all, changes=(41,))))
    web, other = chart.layers
    assert (web.name, other.name) == ("web", "code")
    # An area holds from the point before it on: point 40 is the 40th step's, which ends at 4,000 tokens.
    assert (web.x[40], web.y[40], web.y[41], other.y[-1]) == (4000, 0.5, 1.0, 0.0)
    assert [(mark.at, mark.text) for mark in chart.marks] == [(4000, "why from step 41")]
    assert chart.description.endswith("Shares of all tokens: web 75%, code 25%. The mixture changed 1 time.")
    assert chart.is_stepped


@pytest.mark.parametrize("steps", [1, 399, 400, 401, 5003])
def test_any_run_is_drawn_with_few_points_that_end_at_its_last_step(steps):
    history = gather(records(steps, shares=lambda step: {"a": 40 + step % 2, "b": 60 - step % 2}))
    assert len(history.mixture) <= 401
    assert history.mixture[-1].step == steps
    for layer in mixture_chart(history).layers:
        assert (layer.x[0], layer.x[-1]) == (0, 100 * steps)


def test_one_corpus_has_no_chart_and_many_are_drawn_as_the_largest_and_the_others():
    assert not mixture_chart(gather(records(9, shares=lambda _: {"web": 100}))).layers
    chart = mixture_chart(gather(records(9, shares=lambda _: {f"c{i}": i + 1 for i in range(13)})))
    assert [layer.name for layer in chart.layers][:2] == ["c12", "c11"]
    assert len(chart.layers) == 8
    assert chart.layers[-1].name == "others"
    assert chart.layers[-1].y[0] == pytest.approx(21 / 91)


def test_hundreds_of_changes_are_thinned():
    history = gather(records(999, shares=half_then_all, changes=range(2, 999)))
    assert 50 <= len(mixture_chart(history).marks) <= 100
