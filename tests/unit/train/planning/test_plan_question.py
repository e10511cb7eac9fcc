"""What a recipe asks the planner, and how the answer comes back."""

import pytest

from penstock.core import config as configs
from penstock.core.errors import ConfigError
from penstock.devices.figures import DEVICES
from penstock.obs.peak import known_peak_flops
from penstock.parallel.layout import layout_of
from penstock.plan.hardware import Cluster
from penstock.plan.search import search
from penstock.train.planning.auto import known_device, machines_of
from penstock.train.planning.devices import config_of
from penstock.train.planning.question import in_numbers, question_of, recipe_for_preset, recipe_of


def asked(*settings):
    raw = configs.override(recipe_for_preset("llama3.2-1b", tokens=1e9, rows=64, length=2048), list(settings))
    return question_of(config_of(raw)[0], raw)


def test_a_question_has_the_recipes_sizes_and_types():
    question = asked("optim.rule=muon", "precision.weights=bfloat16_stochastic", "compute=bfloat16")
    assert (question.step.sequence_length, question.global_batch_size) == (2048, 64)
    assert (question.kept.weights, question.kept.optimizer) == (2, 4.0)
    assert question.step.kernels == "compiled"
    assert dict(question.decided) == {}


def test_batches_of_the_schedule_are_divided_too():
    schedule = "data.schedule=[{at_step = 5, global_batch_size = 96}]"
    assert asked(schedule).global_batch_size == 32


def test_what_a_setting_excludes_is_decided():
    assert asked("optim.rule=adamw_8bit").decided == {"tensor": 1}
    decided = asked("parallel.reshard_after_forward=8").decided
    assert decided == {"reshard_after_forward": 8, "tensor": 1, "pipeline": 1, "replicate": 1}


def test_what_a_pipeline_keeps_anyway_is_asked_without_pipelines():
    assert asked("ethernet.keep_mib=64").decided == {"keep_mib": 64, "pipeline": 1}
    decided = asked("ethernet.schedule=breadth_first").decided
    assert decided == {"schedule": "breadth_first", "pipeline": 1}


def test_memory_is_planned_with_the_feedback_of_rounded_gradients():
    plain, feeding = (
        search(asked("ethernet.reduce=int8", *more), cluster_with()).best
        for more in ((), ("ethernet.feedback=true",))
    )
    assert (plain.memory.feedback, plain.job.feedback) == (0, False)
    assert feeding.memory.feedback > 0


def test_the_size_of_islands_is_not_planned():
    islands = ("outer.every=8", "outer.min_islands=1", "parallel.replicate=-1", "parallel.shard=2")
    decided = {"shard": 2, "replicate": -1, "tensor": 1, "context": 1, "pipeline": 1}
    assert asked(*islands).decided == decided


def test_a_hierarchy_is_asked_and_answered_in_numbers():
    raw = configs.override(
        recipe_for_preset("llama3.2-1b", tokens=1e9, rows=64, length=2048), ["parallel.hierarchy=hybrid"]
    )
    numbers = in_numbers(raw, config_of(raw)[0], world_size=16, ranks_per_machine=8)
    question = question_of(config_of(numbers)[0], numbers)
    assert (question.decided["shard"], question.decided["tensor"]) == (8, 1)
    recipe = recipe_of({**numbers, "plan": "auto"}, search(question, cluster_with(nodes=2)).best)
    layout = layout_of(config_of(recipe)[0].parallel, world_size=16)
    assert (layout.shard, layout.replicate) == (8, 2)
    assert "plan" not in recipe


def cluster_with(**changes):
    return Cluster(device=DEVICES["A100-80GB"], **changes)


@pytest.mark.parametrize(
    ("name", "memory", "ours"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "A100-40GB"),
        ("NVIDIA H100 PCIe", 79.6, "H100-PCIe"),
        ("NVIDIA H100 80GB HBM3", 79.6, "H100-80GB"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("NVIDIA L4", 22.0, "L4"),
    ],
)
def test_a_gpu_is_known_by_its_drivers_name(name, memory, ours):
    device = known_device(name, memory_gib=memory)
    assert (device.name, device.memory_gib) == (ours, memory)


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("GTX 1080", 8),
        ("NVIDIA L40", 44.4),
        ("NVIDIA RTX A1000", 8),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.8),
    ],
)
def test_an_unknown_gpu_is_refused_with_what_to_do(name, memory):
    with pytest.raises(ConfigError, match=rf"no data sheet of this GPU \(got '{name}, .*cluster\.toml"):
        known_device(name, memory_gib=memory)


def test_the_processors_of_this_machine_are_shared_by_its_ranks(monkeypatch):
    monkeypatch.setattr("penstock.train.planning.auto.peak_flops", lambda *_: 2e10)
    two, four = (machines_of(world_size=ranks, compute="float32") for ranks in (2, 4))
    assert (two.nodes, two.devices_per_node, four.devices_per_node) == (1, 2, 4)
    assert two.device.memory_gib == pytest.approx(2 * four.device.memory_gib)
    assert two.device.float32_tflops == 0.02


@pytest.mark.parametrize("row", [row for row in DEVICES.values() if row.architecture not in ("cpu", "volta")])
def test_the_planner_and_the_mfu_of_runs_have_the_same_peaks(row):
    assert known_peak_flops(row.name.replace("-", " ")) == 1e12 * row.bfloat16_tflops
