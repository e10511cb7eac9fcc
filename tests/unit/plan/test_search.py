"""Plans that are found: what fits, what nothing beats, what is simplest; and what is decided stays."""

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from penstock.core.errors import ConfigError
from penstock.devices.figures import DEVICES
from penstock.models.decoder.config import DecoderConfig
from penstock.parallel.layout import RankLayout
from penstock.plan.candidates import Question, divisors, jobs, layouts
from penstock.plan.hardware import Cluster
from penstock.plan.job import TrainingStep
from penstock.plan.memory import BytesPerParameter, peak
from penstock.plan.report import PlanReport, why_chosen
from penstock.plan.search import (
    HEADROOM,
    Option,
    SearchResult,
    breadth_first,
    coded,
    search,
    what_would_help,
    wider,
)

MODEL = DecoderConfig(
    vocab_size=32_000,
    hidden_size=2048,
    intermediate_size=5504,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=4096,
)
STEP = TrainingStep(model=MODEL, layout=RankLayout(), sequence_length=4096)
QUESTION = Question(step=STEP, global_batch_size=256)
CLUSTER = Cluster(nodes=4, devices_per_node=8, device=DEVICES["A100-40GB"], nics=1, nic_gbit_s=100)
SMALL = replace(CLUSTER, device=replace(DEVICES["A100-40GB"], memory_gib=9.0))


@cache
def searched(cluster):
    """Return the result of QUESTION, at which several tests look."""
    return search(QUESTION, cluster)


def test_every_layout_fills_the_cluster_and_deals_the_batch_evenly():
    found = list(layouts(QUESTION, CLUSTER))
    assert len(found) > 30
    for layout, stages in found:
        assert layout.world_size == 32
        assert QUESTION.global_batch_size % layout.num_data == 0
        assert layout.tensor <= 8, "within a machine"
        assert layout.pipeline * stages <= 16
    assert len(set(found)) == len(found)


def test_micro_batches_make_up_the_batch_and_feed_the_pipeline():
    for layout, stages in layouts(QUESTION, CLUSTER):
        for job in jobs(QUESTION, layout, stages, CLUSTER):
            assert job.micro_batch_size * job.num_micro_batches * layout.num_data == 256
            assert job.num_micro_batches >= layout.pipeline


def test_an_update_reads_and_writes_the_state_that_is_kept():
    question = replace(QUESTION, kept=BytesPerParameter(weights=4.0, gradients=2.0, optimizer=2.5))
    assert next(jobs(question, RankLayout(shard=32), 1, CLUSTER)).state_bytes == 8.5


def test_all_that_is_found_fits_and_nothing_on_the_front_is_beaten():
    found = searched(SMALL)
    room = (1 - HEADROOM) * 9 * 2**30
    assert found.tried > 100
    assert all(option.memory.total <= room for option in [found.best, *found.pareto])
    for faster, smaller in pairwise(found.pareto):
        assert faster.speed >= smaller.speed
        assert faster.memory.total > smaller.memory.total
    assert found.best.speed >= 0.7 * found.pareto[0].speed


def test_what_is_planned_is_what_the_memory_of_the_job_says():
    found = searched(SMALL)
    assert found.best.memory == peak(found.best.job)


def test_memory_that_is_there_is_used_before_anything_is_computed_again():
    plenty = search(QUESTION, replace(CLUSTER, device=replace(DEVICES["A100-80GB"], memory_gib=500.0)))
    assert set(plenty.best.job.block_modes) == {"keep"}
    scarce = searched(SMALL)
    assert scarce.best.speed < plenty.best.speed


def test_some_blocks_compute_again_where_not_all_have_to():
    decided = {"tensor": 1, "context": 1, "pipeline": 1, "shard": 32, "micro_batch_size": 4, "keep_mib": 0.0}
    decided |= {"schedule": "depth_first"}
    decided["window_mib"] = 0.0
    question = replace(QUESTION, decided=decided)
    mixed = search(question, replace(CLUSTER, device=replace(DEVICES["A100-40GB"], memory_gib=20.0))).best.job
    modes = mixed.block_modes
    assert len(set(modes)) == 2, modes
    assert list(modes) == sorted(modes, key=["full", "operators", "keep"].index), (
        "those that do most come first"
    )


def test_what_is_decided_stays():
    decided = {"tensor": 2, "pipeline": 2, "micro_batch_size": 2, "modes": "full", "replicate": 2}
    found = search(replace(QUESTION, decided=decided), CLUSTER)
    for option in [found.best, *found.pareto]:
        assert (option.job.layout.tensor, option.job.layout.pipeline, option.job.layout.replicate) == (
            2,
            2,
            2,
        )
        assert (option.job.micro_batch_size, option.job.modes) == (2, "full")


def test_long_rows_may_be_shared():
    model = replace(MODEL, max_position_embeddings=32_768)
    long = replace(QUESTION, step=replace(STEP, model=model, sequence_length=32_768))
    assert {layout.context for layout, _ in layouts(long, CLUSTER)} >= {1, 2, 4, 8}
    assert {layout.context for layout, _ in layouts(QUESTION, CLUSTER)} == {1}


def test_what_does_not_fit_says_how_much_is_missing():
    tiny = replace(CLUSTER, device=replace(DEVICES["A100-40GB"], memory_gib=0.1))
    with pytest.raises(ConfigError, match=r"smallest plan on 32 devices takes .* a device has 87\.0 MiB"):
        search(QUESTION, tiny)
    with pytest.raises(ConfigError, match="No layout shares this model and 7 rows over 32 devices"):
        search(replace(QUESTION, global_batch_size=7, decided={"pipeline": 1}), CLUSTER)


def test_a_faster_network_helps_what_waits_for_it_and_memory_what_computes_again():
    slow = replace(CLUSTER, nic_gbit_s=10)
    job = next(jobs(QUESTION, RankLayout(shard=32), 1, CLUSTER))
    helps = {one.change: one.gain for one in what_would_help(replace(job, modes="full"), slow)}
    assert helps["with 2 NICs a node"] > 0.2
    assert helps["with all parameters kept through a step"] > 0.2
    assert list(helps.values()) == sorted(helps.values(), reverse=True)
    alone = Cluster(nodes=1, devices_per_node=8, device=DEVICES["A100-80GB"])
    local = next(jobs(QUESTION, RankLayout(shard=8), 1, CLUSTER))
    assert not any("NIC" in one.change for one in what_would_help(local, alone))


def test_divisors_are_all_there():
    assert all(n % d == 0 for n in (1, 7, 96) for d in divisors(n))
    assert [len(divisors(n)) for n in (1, 7, 96)] == [1, 2, 12]


def test_a_plan_that_keeps_everything_says_so_without_end():
    decided = {"tensor": 1, "context": 1, "pipeline": 1, "shard": 32, "micro_batch_size": 1}
    found = search(replace(QUESTION, decided=decided), replace(CLUSTER, nic_gbit_s=10))
    assert math.isinf(found.best.job.keep_mib)


SLOW = replace(CLUSTER, nic_gbit_s=5)
PLAIN = {"tensor": 1, "context": 1, "pipeline": 1, "shard": 32, "micro_batch_size": 1, "keep_mib": 0.0}


def test_fewer_bits_are_planned_only_where_they_may_and_the_network_waits():
    question = replace(QUESTION, decided=PLAIN)
    exact = search(question, SLOW).best
    coded = search(replace(question, may_compress=True), SLOW).best
    assert (exact.job.gather, exact.job.reduce) == ("compute", "float32")
    assert (coded.job.gather, coded.job.reduce) == ("int8", "int8")
    assert coded.speed > 1.5 * exact.speed
    fast = replace(CLUSTER, nic_gbit_s=10_000, usable_gbit_s=10_000)
    assert search(replace(question, may_compress=True), fast).best.job.reduce == "float32"


def test_what_is_decided_of_the_wire_is_not_tried_otherwise():
    job = next(jobs(QUESTION, RankLayout(shard=32), 1, CLUSTER))
    assert [other.window_mib for other in wider(job, {})] == [355.0, 709.0]
    assert not list(wider(job, {"window_mib": 0.0}))
    assert not list(coded(job, QUESTION))
    asked = replace(QUESTION, may_compress=True, decided={"gather": "compute"})
    assert [(other.gather, other.reduce) for other in coded(job, asked)] == [("compute", "int8")]


def test_breadth_first_is_planned_where_the_network_waits_and_activations_fit():
    wide = replace(SLOW, device=replace(SLOW.device, memory_gib=400.0))
    question = replace(QUESTION, decided={**PLAIN, "modes": "keep"})
    assert search(question, wide).best.job.schedule == "breadth_first"
    small = replace(SLOW, device=replace(SLOW.device, memory_gib=34.0))
    assert search(question, small).best.job.schedule == "depth_first", "no room"
    again = search(replace(question, decided=PLAIN), small).best.job
    assert (again.schedule, again.modes) == ("breadth_first", "operators"), "room for what is computed again"
    fast = replace(wide, nic_gbit_s=10_000, usable_gbit_s=10_000)
    assert search(question, fast).best.job.schedule == "depth_first", "no need"


def test_breadth_first_is_tried_with_all_that_is_open_and_only_where_it_changes_anything():
    job = replace(next(jobs(QUESTION, RankLayout(shard=32), 1, CLUSTER)), num_micro_batches=8)
    tried = [(other.schedule, other.keep_mib) for other in breadth_first(job, {})]
    assert tried == [("breadth_first", 0.0), ("breadth_first", math.inf)]
    assert len(list(breadth_first(job, {"keep_mib": 0.0}))) == 1
    for same in (
        replace(job, num_micro_batches=1),
        replace(job, layout=RankLayout(pipeline=2, shard=16)),
        replace(job, layout=RankLayout()),
        replace(job, schedule="breadth_first"),
    ):
        assert not list(breadth_first(same, {}))
    assert not list(breadth_first(job, {"schedule": "depth_first"}))


def test_a_loader_that_was_measured_is_waited_for():
    served = replace(CLUSTER, loader_tokens_s=1000.0)
    job = next(jobs(QUESTION, RankLayout(shard=32), 1, served))
    assert job.data_tokens_per_s == 1000.0
    assert search(QUESTION, served).best.prediction.limit == "the loader"


def options(*speeds_and_bands: tuple[float, float]) -> list[Option]:
    """Return options that differ in predicted tokens/s and in the error band alone."""
    found = searched(CLUSTER).best
    return [
        replace(found, prediction=replace(found.prediction, tokens_per_s_per_device=speed, band=band))
        for speed, band in speeds_and_bands
    ]


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([(990.0, 0.1)], ""),
        ([(1100.0, 0.5)], "predicted faster, but with an error of up to 50% where the chosen plan's is 10%"),
        ([(1100.0, 0.5), (1200.0, 0.6)], "The plan at 1,200 tokens/s"),
        ([(1010.0, 0.1)], "faster by 1.0%, which is less than predictions can tell"),
    ],
)
def test_where_a_faster_plan_stands_below_the_chosen_one_the_report_says_why(others, said):
    chosen, *rest = options((1000.0, 0.1), *others)
    found = SearchResult(best=chosen, pareto=[*rest, chosen], tried=2, simulated=2)
    reason = why_chosen(found)
    assert (said in reason) if said else not reason
    report = PlanReport(question=QUESTION, cluster=CLUSTER, found=found, helps=(), tokens=0.0)
    assert report.as_json()["why_chosen"] == (reason or None)
    lines = report.as_text().splitlines()
    marked = [line for line in lines if line.startswith("* ")]
    assert len(marked) == 1
    assert "1,000" in marked[0]
    assert reason in report.as_text()


def test_a_length_in_epochs_is_shown_with_its_steps():
    (chosen,) = options((1000.0, 0.1))
    found = SearchResult(best=chosen, pareto=[chosen], tried=1, simulated=1)
    report = PlanReport(
        question=QUESTION, cluster=CLUSTER, found=found, helps=(), tokens=2e6, steps=1200, epochs=2.5
    )
    assert "  2M tokens in 1,200 steps, 2.5 epochs: " in report.as_text()
    assert report.as_json().items() >= {"tokens": 2e6, "steps": 1200, "epochs": 2.5}.items()
