"""What benchmarks/ethernet.py makes of its measurements: bounds, medians, aims, and what stays filed."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from ethernet import aims, at_best, hiding_share, joined, median_of_rounds
from ethernet_cases import SETTINGS, STOCK, WHOLE, Case, recipe_of


@pytest.mark.parametrize(
    ("setting", "hidden"),
    [
        ("naive", 0),
        ("tuned", 0),
        ("keep", 0),
        ("tuned, unshard", 0.25),
        ("exact", 0.25),
        ("overlap", 1),
        ("breadth, kept", 1),
    ],
)
def test_what_a_schedule_can_hide_bounds_its_step(setting, hidden):
    recipe = recipe_of(Case(rate="1gbit"), *SETTINGS[setting], hidden=32)
    assert hiding_share(recipe, STOCK.get(setting, ()), 4) == hidden
    assert at_best(4.0, 0.5, hiding=hidden) == (4.5 if hidden == 0 else 4.0)
    assert at_best(4.0, 5.0, hiding=hidden) == pytest.approx(9.0 - 4.0 * hidden)


def test_of_several_rounds_themedian_of_rounds_counts_if_all_do():
    rows = [{"step_s": s, "counts": s < 3} for s in (3.0, 1.0, 2.0)]
    assert median_of_rounds(rows) == {"step_s": 2.0, "counts": False, "rounds_s": [3.0, 1.0, 2.0]}


def case(rows, **of):
    alike = {"rate": "500mbit", "micro_batches": 4, "is_paced": True, "processes": 1, "nics": 1, "rounds": 1}
    settings = [{"setting": n, "busy": b, "step_s": s, "counts": c} for n, b, s, c in rows]
    return {**alike, **of, "rows": settings}


def test_an_aim_is_missed_by_its_figure_and_unasked_where_a_row_does_not_count():
    slow = case([("naive", 0.1, 9.0, True), ("exact", 0.7, 2.0, True)], rate="200mbit")
    found = aims([slow, case([("naive", 0.3, 9.0, True), ("exact", 0.8, 2.0, False)])])
    assert {(aim["found"], aim["met"]) for aim in found} == {(4.5, False), (0.3, False)}


def test_a_case_measured_again_takes_the_place_of_the_one_filed_before():
    first, second = (whole.title for whole, _ in WHOLE[:2])
    filed = [{"title": first, "rows": 1}, {"title": second, "rows": 2}]
    assert joined(filed, [{"title": first, "rows": 3}]) == [{"title": first, "rows": 3}, filed[1]]
    assert joined(filed[1:], [{"title": first, "rows": 3}]) == [{"title": first, "rows": 3}, filed[1]]
