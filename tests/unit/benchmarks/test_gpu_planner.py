"""The planner's part of the GPU kit: predictions by rows' names, filed before a run and held against it."""

import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import torch
from gpu_parts.part import Part
from gpu_parts.planner import Planner, filed_before
from gpu_parts.predictions import (
    WITHIN,
    decode_segments,
    error_percent,
    predictions,
    serving_prediction,
    training_prediction,
)
from gpu_parts.serving import EAGER, GRAPHS
from gpu_parts.training import GIB, LENGTH, SHAPES, needed_bytes, recipe_of
from serve_load import one

from penstock.devices.figures import DEVICES
from penstock.plan.hardware import Cluster

ROOT = Path(__file__).parents[3]
H100, H200 = (Cluster(devices_per_node=1, device=DEVICES[name]) for name in ("H100-80GB", "H200"))
VOCABULARY = 128_256


@pytest.mark.parametrize(
    ("answers", "segments"),
    [([1], []), ([5], [(1, 4)]), ([1, 3], [(1, 2)]), ([9, 2, 5, 5], [(4, 1), (3, 3), (1, 4)])],
)
def test_steps_are_counted_with_the_answers_that_are_not_done(answers, segments):
    assert decode_segments(answers) == segments
    assert sum(batch * steps for batch, steps in segments) == sum(answers) - len(answers)


def test_an_error_is_of_what_was_measured():
    assert error_percent(50.0, 200.0) == pytest.approx(-75)


def test_a_cut_model_is_predicted_as_cut(tmp_path):
    few, whole = (
        training_prediction(
            recipe_of(
                tmp_path, SHAPES["8b"] | {"num_hidden_layers": n}, rows=2, length=LENGTH, compiled=True
            ),
            H200,
        )
        for n in (8, 32)
    )
    assert 2 < few[0] / whole[0] < 4  # the output matrix stays
    assert whole[1] > 2 * few[1]


def test_a_stream_alone_is_not_faster_than_the_memory():
    requests = one(32, 129, vocabulary=VOCABULARY, seed=1)
    with_graphs, eager, in_8_bits = (
        serving_prediction("8b", weights, mode, requests, H200)[1]
        for weights, mode in (("bfloat16", GRAPHS), ("bfloat16", EAGER), ("int8", GRAPHS))
    )
    assert 2 * 7.5e9 / 4.8e12 < with_graphs / 128 < eager / 128
    assert in_8_bits < with_graphs


def plain_loop(*, compiled):
    recipe = recipe_of(Path("run"), SHAPES["1b"], rows=2, length=LENGTH, compiled=compiled)
    return training_prediction(recipe, H100)[0], needed_bytes(recipe) / GIB


def prompt_speed(mode):
    prompt = one(2048, 1, vocabulary=VOCABULARY, seed=2)
    return 2048 / serving_prediction("8b", "bfloat16", mode, prompt, H100)[0]


UNTOUCHED = {
    "train 1b plain loop compiled, 8192 tokens a step: tokens/s": lambda: plain_loop(compiled=True)[0],
    "train 1b plain loop compiled, 8192 tokens a step: peak memory": lambda: plain_loop(compiled=True)[1],
    "train 1b plain loop eager, 8192 tokens a step: tokens/s": lambda: plain_loop(compiled=False)[0],
    "train 1b plain loop eager, 8192 tokens a step: peak memory": lambda: plain_loop(compiled=False)[1],
    "serve 8b bfloat16, eager, prompts: tokens/s": lambda: prompt_speed(EAGER),
}
"""Rows of 2026-11-26 that no change of the code touched since: torch's own loop, and prompts, of whose work
96% is products. Their predictions."""
TOUCHED = {
    "train * bfloat16 *": "the loss, attention by SDPA, one rank without FSDP2, one wait a step",
    "train * float8 *": "the same, one rounding of each matrix, fast accumulation, small matrices left out",
    "serve 8b bfloat16, eager, alone: *": "one upload a step, draws by one kernel",
    "serve 8b bfloat16, eager, 64 requests: *": "one upload a step, draws by one kernel",
    "serve 8b bfloat16, graphs, alone: *": "one graph for a whole step, draws by one kernel",
}
"""The others, each with the changes that touched it."""


def rows_of_the_first_run():
    result = json.loads((ROOT / "benchmarks" / "results" / "gpu-2026-11-26.json").read_text())
    return {
        row["name"]: row["value"]
        for part in ("training", "serving")
        for row in result["parts"][part]["rows"]
        if row["status"] == "measured" and row["unit"] in ("tokens/s", "ms", "GiB")
    }


def test_every_row_of_the_first_run_was_touched_by_a_change_or_by_none():
    for name in rows_of_the_first_run():
        touched = [pattern for pattern in TOUCHED if fnmatchcase(name, pattern)]
        assert len(touched) + (name in UNTOUCHED) == 1, name


@pytest.mark.parametrize("name", UNTOUCHED)
def test_rows_that_no_change_touched_are_predicted(name):
    measured = rows_of_the_first_run()[name]
    assert abs(error_percent(UNTOUCHED[name](), measured)) < WITHIN


@pytest.fixture(scope="module")
def predicted():
    return predictions(H100)


def part_with(folder, rows):
    """A part of the planner beside what other parts measured: name -> (part, value, unit)."""
    for name in ("training", "tuning", "serving"):
        of_part = [
            {"name": row, "status": "measured", "value": value, "unit": unit}
            for row, (part, value, unit) in rows.items()
            if part == name
        ]
        (folder / f"{name}.json").write_text(json.dumps({"rows": of_part}))
    return Part("planner", torch.device("cpu"), False, 60.0, folder / "planner.json")


ROW = "train 1b bfloat16 compiled, 8192 tokens a step: tokens/s"


def test_a_run_is_held_against_what_was_filed_before_it(tmp_path, capsys):
    filed = {"date": "2026-12-01", "rows": {"H100-80GB": {ROW: {"predicted": 50_000.0, "unit": "tokens/s"}}}}
    (tmp_path / "gpu_predict-2026-12-01.json").write_text(json.dumps(filed))
    part = part_with(tmp_path, {ROW: ("training", 40_000.0, "tokens/s"), "other": ("serving", 3.0, "ms")})
    Planner(part, H100, tmp_path).rows()
    held, without = part.rows
    assert (held.name, held.value, held.is_met) == (f"plan {ROW}", pytest.approx(25.0), False)
    assert (held.more["predicted"], held.more["measured"]) == (50_000.0, 40_000.0)
    assert held.more["filed"] == "2026-12-01"
    assert (without.status, without.why) == ("skipped", "other")
    assert "predicted 5e+04, measured 4e+04 tokens/s (+25.0%)" in capsys.readouterr().out


def test_without_a_file_the_prediction_is_made_now_and_says_so(tmp_path, predicted):
    value = predicted[ROW][0]
    part = part_with(tmp_path, {ROW: ("training", value, "tokens/s")})
    Planner(part, H100, tmp_path).rows()
    assert part.rows[0].value == pytest.approx(0.0)
    assert part.rows[0].more["filed"] == "not before the run"


def test_the_newest_file_with_the_device_counts(tmp_path):
    for date, device in (("2026-12-01", "H100-80GB"), ("2026-12-02", "H100-80GB"), ("2026-12-03", "H200")):
        found = {"date": date, "rows": {device: {"a": {"predicted": 1.0, "unit": "ms"}}}}
        (tmp_path / f"gpu_predict-{date}.json").write_text(json.dumps(found))
    assert filed_before("H100-80GB", tmp_path) == ({"a": 1.0}, "2026-12-02")
    assert filed_before("B200", tmp_path) == ({}, "")


def kit_rows():
    result = json.loads(sorted((ROOT / "benchmarks" / "results").glob("null-gpu-kit-*.json"))[-1].read_text())
    return {
        row["name"]: row["unit"]
        for part in ("training", "tuning", "serving")
        for row in result["parts"][part]["rows"]
        if row["unit"] in ("tokens/s", "ms", "GiB")
    }


NOT_PREDICTED = (
    "* plain loop *",
    "* peft *",
    "*transformers*",
    "*, documents,*",
    "*host time*",
    "*device idle*",
    "*between tokens*",
)


def test_every_row_of_the_kit_has_a_prediction_but_those_that_are_named(predicted):
    for name, unit in kit_rows().items():
        if not any(fnmatchcase(name, pattern) for pattern in NOT_PREDICTED):
            assert predicted[name][1] == unit, name
