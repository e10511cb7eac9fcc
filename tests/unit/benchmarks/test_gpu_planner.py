"""The planner's part of the GPU kit predicts the job that was measured, and says how far off it is."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from gpu_parts.planner import decode_segments, error_percent, serving_prediction, training_prediction
from gpu_parts.serving import EAGER, GRAPHS

from penstock.devices.figures import DEVICES
from penstock.plan.hardware import Cluster

H200 = Cluster(devices_per_node=1, device=DEVICES["H200"])


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
    job = {"shape": "8b", "layers": 8, "rows": 2, "length": 4096, "linear": "compute", "compiled": True}
    few, _ = training_prediction({**job, "is_tiny": False}, H200, tmp_path)
    whole, band = training_prediction({**job, "layers": 32, "is_tiny": False}, H200, tmp_path)
    assert 2 < few / whole < 4  # the output matrix stays
    assert 0 < band < 1


def test_a_stream_alone_is_not_faster_than_the_memory():
    job = {"shape": "8b", "weights": "bfloat16", "is_tiny": False, "prompts": [32], "answers": [129]}
    _, with_graphs, _ = serving_prediction({**job, "mode": GRAPHS}, H200)
    _, eager, _ = serving_prediction({**job, "mode": EAGER}, H200)
    assert 2 * 7.5e9 / 4.8e12 < with_graphs / 128 < eager / 128
    _, in_8_bits, _ = serving_prediction({**job, "mode": GRAPHS, "weights": "int8"}, H200)
    assert in_8_bits < with_graphs
