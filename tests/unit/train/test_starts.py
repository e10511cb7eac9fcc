"""The recipe of each start is kept, and what differs from the start before is known."""

import json

import pytest

from penstock.core.toml import differences
from penstock.train.starts import keep_recipe

RECIPE = {"run": {"steps": 40, "dir": "r"}, "optim": {"learning_rate": 0.1}, "validate": {"every": None}}


def changed(**sections):
    return {name: values | sections.get(name, {}) for name, values in RECIPE.items()}


def test_the_first_start_changes_nothing_and_later_ones_say_what(tmp_path):
    first = keep_recipe(tmp_path, RECIPE, step=0)
    assert (first.file, first.changes) == ("starts/0001-step-00000000.json", {})
    second = keep_recipe(tmp_path, changed(optim={"learning_rate": 0.05, "beta1": 0.8}), step=12)
    assert second.file == "starts/0002-step-00000012.json"
    assert second.changes == {"optim.learning_rate": (0.1, 0.05), "optim.beta1": (None, 0.8)}
    third = keep_recipe(tmp_path, RECIPE, step=12)
    assert third.changes == {"optim.learning_rate": (0.05, 0.1), "optim.beta1": (0.8, None)}
    kept = [json.loads((tmp_path / each.file).read_text()) for each in (first, second, third)]
    assert [each["optim"].get("beta1") for each in kept] == [None, 0.8, None]
    assert json.loads((tmp_path / "config.json").read_text()) == RECIPE


def test_a_start_goes_on_counting_where_others_were_removed(tmp_path):
    for step in range(3):
        keep_recipe(tmp_path, RECIPE, step=step)
    (tmp_path / "starts" / "0001-step-00000000.json").unlink()
    assert keep_recipe(tmp_path, RECIPE, step=9).file.startswith("starts/0004-")


def test_a_damaged_recipe_of_before_is_no_reason_not_to_start(tmp_path):
    (tmp_path / "config.json").write_text("{")
    assert keep_recipe(tmp_path, RECIPE, step=3).changes == {}
    assert json.loads((tmp_path / "config.json").read_text()) == RECIPE


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ({"a": [1, 2]}, {"a": [1, 2]}, {}),
        ({"a": True}, {"a": False}, {"a": (True, False)}),
        ({"a": {}}, {"a": {"b": 1}}, {"a.b": (None, 1)}),
        ({"a": {"b": None}}, {"a": {}}, {}),
    ],
)
def test_recipes_are_compared_setting_by_setting(before, now, found):
    assert differences(before, now) == found


def test_a_file_of_someone_else_beside_the_kept_recipes_is_passed_over(tmp_path):
    keep_recipe(tmp_path, RECIPE, step=0)
    (tmp_path / "starts" / "notes.json").write_text("{}")
    assert keep_recipe(tmp_path, RECIPE, step=3).file == "starts/0002-step-00000003.json"
