"""Predictions of whole steps: a few jobs held where published measurements have them, and what is refused."""

import math
from dataclasses import replace

import pytest

from penstock.core.errors import ConfigError
from penstock.models.llama.config import LlamaConfig
from penstock.models.presets import expanded
from penstock.parallel.layout import Layout
from penstock.plan.hardware import DEVICES, Cluster
from penstock.plan.job import Job
from penstock.plan.predict import predict, timeline_of

LLAMA_7B = LlamaConfig(**expanded({"preset": "llama2-7b"}))
LLAMA_70B = LlamaConfig(**expanded({"preset": "llama2-70b"}))
A100 = Cluster(
    nodes=16, devices_per_node=8, device=DEVICES["A100-80GB"], nics=4, transport="rdma", latency_us=10
)
JOB = Job(
    model=LLAMA_7B,
    layout=Layout(replicate=16, shard=8),
    sequence_length=4096,
    micro_batch_size=2,
    reduce="bfloat16",
)


@pytest.mark.parametrize(("kernels", "measured"), [("compiled", 4550), ("eager", 3700)])
def test_llama_7b_on_128_a100_is_where_fms_fsdp_measured_it(kernels, measured):
    found = predict(replace(JOB, kernels=kernels), A100)
    assert found.tokens_per_s_per_device == pytest.approx(measured, rel=0.05)  # what it was fitted to


def test_the_parts_add_up_to_the_step():
    for job in (
        JOB,
        replace(
            JOB, layout=Layout(shard=128), num_micro_batches=7, checkpoint_every=50, data_tokens_per_s=2000.0
        ),
        replace(JOB, layout=Layout(pipeline=4, shard=16, tensor=2), num_micro_batches=16),
        replace(JOB, layout=Layout(replicate=16, shard=8), outer_every=50, outer_bits=8),
        replace(JOB, layout=Layout(shard=128), window_mib=math.inf),
    ):
        found = predict(job, A100)
        assert sum(found.parts.values()) == pytest.approx(found.step_s)


def test_the_widest_part_is_named():
    slow = replace(A100, nics=1, nic_gbit_s=1.0)
    assert predict(replace(JOB, layout=Layout(shard=128)), slow).limit == "the network"
    assert predict(JOB, A100).limit == "computing"
    assert predict(replace(JOB, data_tokens_per_s=100.0), A100).limit == "the loader"


def test_compressed_gradients_between_nodes_are_a_quarter_of_the_bytes():
    whole, coded = (predict(replace(JOB, reduce=codec), A100) for codec in ("float32", "int8"))
    assert coded.network_bytes == pytest.approx(whole.network_bytes * (8 + 32 / 128) / 32)


def test_copies_that_meet_every_fifty_steps_send_little():
    often, seldom = predict(JOB, A100), predict(replace(JOB, outer_every=50, outer_bits=4), A100)
    assert seldom.network_bytes == pytest.approx(often.network_bytes * (4 + 32 / 128) / 16 / 50, rel=0.01)


def test_a_pipeline_of_one_micro_batch_mostly_waits():
    job = replace(JOB, layout=Layout(pipeline=8, shard=16))
    few, many = (predict(replace(job, num_micro_batches=n), A100) for n in (8, 64))
    assert few.bubble_s / few.step_s == pytest.approx(7 / 15, rel=0.2)
    assert many.bubble_s / many.step_s < 0.12


def test_a_pipeline_is_as_slow_as_its_last_rank_which_has_the_output_matrix():
    job = replace(JOB, layout=Layout(pipeline=4, shard=32), num_micro_batches=32)
    events = timeline_of(job, A100, record=True).events
    names = {event.name for event in events}
    assert names == {f"block {index}" for index in range(24, 32)} | {"head"}


def test_float8_products_are_faster_only_where_there_are_some():
    hopper = replace(A100, device=DEVICES["H100-80GB"])
    large = replace(JOB, model=LLAMA_70B, layout=Layout(shard=128), micro_batch_size=4)
    times = [
        predict(replace(large, linear=linear), hopper).step_s for linear in ("compute", "float8_tensorwise")
    ]
    assert 0.55 < times[1] / times[0] < 0.8
    with pytest.raises(ConfigError, match=r"not modelled on A100-80GB \(got 'float8_tensorwise'\)"):
        predict(replace(JOB, linear="float8_tensorwise"), A100)


def test_a_layout_of_another_size_is_refused():
    with pytest.raises(ConfigError, match="8 ranks, and the cluster 128 devices"):
        predict(replace(JOB, layout=Layout(shard=8)), A100)


def test_synchronising_one_copy_is_refused():
    with pytest.raises(ConfigError, match="there is one copy"):
        predict(replace(JOB, layout=Layout(shard=128), outer_every=10), A100)


def test_eighty_blocks_are_simulated_once_whatever_the_micro_batches():
    job = replace(JOB, model=LLAMA_70B, layout=Layout(shard=128), num_micro_batches=500)
    events = timeline_of(job, A100, record=True).events
    assert len(events) < 3 * 2 * 81 * 3


def test_gloo_uses_several_cards_only_where_collectives_are_cut_into_pieces():
    hosts = Cluster(nodes=2, devices_per_node=1, device=DEVICES["CPU"], nics=2, nic_gbit_s=0.2)
    job = replace(JOB, layout=Layout(shard=2), compute="float32", micro_batch_size=1)
    both, one = (timeline_of(replace(job, operations=n), hosts).busy_s["network"] for n in (0, 1))
    assert one > 1.8 * both
