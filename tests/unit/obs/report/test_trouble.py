"""Trouble in a report: steps that were not taken, ranks that were waited for."""

import re

from penstock.obs.report.html import trouble
from tests.run_records import gather


def step(number):
    return {"step": number, "tokens": number, "loss": 1.0}


def ranks(number, rank, *, slowest_s):
    times = {"slowest_rank": rank, "slowest_s": slowest_s, "median_s": 1.0}
    return {"event": "ranks", "step": number, **times}


def said(*records):
    return " ".join(re.sub(r"<[^>]+>", " ", trouble(gather([step(1), *records]))).split())


def test_a_run_without_trouble_has_no_section():
    assert said(ranks(1, 3, slowest_s=1.1)) == ""


def test_skipped_steps_are_listed_with_why_and_nothing_in_it_is_markup():
    assert said({"event": "skipped", "step": 7, "why": "The loss is nan"}) == (
        "1 step not taken step why 7 The loss is nan"
    )
    html = trouble(gather([step(1), {"event": "skipped", "step": 7, "why": "<b>"}]))
    assert "<b>" not in html


def test_hundreds_of_skipped_steps_are_cut_to_the_last():
    text = said(*({"event": "skipped", "step": n, "why": "inf"} for n in range(2, 202)))
    assert text.startswith("200 steps not taken, the last 50")
    assert text.count("inf") == 50


def test_a_rank_that_is_often_slow_is_listed_with_how_slow_it_was():
    text = said(*(ranks(n, 3, slowest_s=1.0 + n) for n in range(1, 4)), ranks(9, 0, slowest_s=1.0))
    assert text.endswith("3 3 4.00")
