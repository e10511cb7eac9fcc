"""Several runs on one page: what is drawn of each, where recipes differ, and nothing in a name is markup."""

import json
import re

import pytest
from html_elements import Elements

from penstock.obs.compare import Run, render_comparison
from penstock.obs.history import gather

RECIPE = {"run": {"dir": "a", "steps": 40}, "optim": {"learning_rate": 0.1}, "compute": "float32"}


def history(steps, *, start=7.0, seconds=1.0, sent=2**20):
    records = [
        {
            "step": step,
            "tokens": 100 * step,
            "loss": start - step / 100,
            "step_s": seconds,
            "tokens_per_s": 100 / seconds,
            "communication_share": 0.25,
            "corpus_tokens": {"web": 60 * step, "code": 40 * step},
        }
        for step in range(1, steps + 1)
    ]
    traffic = {"event": "traffic", "step": 2, "sent_bytes": {"shard": sent}, "network_axes": []}
    return gather([*records[:2], traffic, *records[2:]])


def comparison(*runs):
    return render_comparison([Run(*run) for run in runs])


def layers(page, chart):
    figure = re.search(rf'<figure class="chart" id="{chart}".*?</figure>', page, re.DOTALL)[0]
    found = re.search(r'<script type="application/json">(.*?)</script>', figure)[1]
    return {layer["name"]: layer for layer in json.loads(found)}


@pytest.fixture(scope="module")
def page():
    slow = RECIPE | {"optim": {"learning_rate": 0.2}, "run": {"dir": "b", "steps": 40}}
    return comparison(("fast", history(40), RECIPE), ("slow", history(20, seconds=10.0, sent=2**21), slow))


def test_losses_are_drawn_by_step_by_tokens_and_by_time(page):
    by_step, by_tokens, by_time = (layers(page, key) for key in ("loss", "loss-by-tokens", "loss-by-time"))
    assert (by_step["fast"]["steps"][-1], by_step["slow"]["steps"][-1]) == ("40", "20")
    assert (by_tokens["fast"]["steps"][-1], by_tokens["slow"]["at"][-1]) == ("4,000", 0.5)
    # 200 s of the slow run are 3.3 minutes; the fast one took 40 s.
    assert (by_time["slow"]["steps"][-1], by_time["fast"]["at"][-1]) == ("3.333", 0.2)
    assert 'data-along="minutes"' in page


def test_speed_communication_and_mixtures_are_drawn_of_each(page):
    assert layers(page, "tokens-per-s")["slow"]["values"][-1] == "10.00"
    assert layers(page, "communication-share")["fast"]["values"][-1] == "25%"
    assert layers(page, "mixture-1")["web"]["values"][-1] == "60%"
    assert "Mixture of slow, share of tokens" in page


def test_tables_say_what_each_run_came_to_and_where_recipes_differ(page):
    text = " ".join(re.sub(r"<[^>]+>", " ", page).split())
    assert "state finished 20 of 40 steps so far" in text
    assert "sent in a step 1.0 MiB 2.0 MiB" in text
    assert "optim.learning_rate 0.1 0.2" in text
    assert "run.dir" not in text


def test_equal_recipes_are_said_to_be(page):
    assert "The recipes are the same" in comparison(("a", history(9), RECIPE), ("b", history(9), RECIPE))
    assert "The recipes are the same" not in page


def test_names_and_settings_cannot_become_markup():
    page = comparison(("<b>x", history(9), {"a": "<script>"}), ("y", history(9), {"a": "</table>"}))
    assert "<b>" not in page
    assert "&lt;script&gt;" in page
    tags = [tag for tag, _ in Elements(re.sub("<!doctype html>", "", page)).found]
    assert tags.count("table") == 2
