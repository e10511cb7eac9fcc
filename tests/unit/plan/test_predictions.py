"""Predictions of whole steps: a few jobs held where published measurements have them, and what is refused."""

import math
from dataclasses import replace

import pytest

from penstock.core.errors import ConfigError
from penstock.devices.figures import DEVICES
from penstock.models.decoder.config import DecoderConfig
from penstock.models.presets import expanded
from penstock.parallel.layout import RankLayout
from penstock.plan.block_costs import units_of
from penstock.plan.comm import groups_of, ring
from penstock.plan.compute import FITTED
from penstock.plan.hardware import Cluster
from penstock.plan.job import TrainingStep
from penstock.plan.predict import predict, timeline_of

LLAMA_7B = DecoderConfig(**expanded({"preset": "llama2-7b"}))
LLAMA_70B = DecoderConfig(**expanded({"preset": "llama2-70b"}))
A100 = Cluster(
    nodes=16, devices_per_node=8, device=DEVICES["A100-80GB"], nics=4, transport="rdma", latency_us=10
)
JOB = TrainingStep(
    model=LLAMA_7B,
    layout=RankLayout(replicate=16, shard=8),
    sequence_length=4096,
    micro_batch_size=2,
    reduce="bfloat16",
)


@pytest.mark.parametrize(("kernels", "measured"), [("compiled", 4550), ("eager", 3700)])
def test_llama_7b_on_128_a100_is_where_fms_fsdp_measured_it(kernels, measured):
    found = predict(replace(JOB, kernels=kernels), A100)
    assert found.tokens_per_s_per_device == pytest.approx(measured, rel=0.08)


def test_the_parts_add_up_to_the_step():
    for job in (
        JOB,
        replace(
            JOB,
            layout=RankLayout(shard=128),
            num_micro_batches=7,
            checkpoint_every=50,
            data_tokens_per_s=2000.0,
        ),
        replace(JOB, layout=RankLayout(pipeline=4, shard=16, tensor=2), num_micro_batches=16),
        replace(JOB, layout=RankLayout(replicate=16, shard=8), outer_every=50, outer_bits=8),
        replace(JOB, layout=RankLayout(shard=128), window_mib=math.inf),
    ):
        found = predict(job, A100)
        assert sum(found.parts.values()) == pytest.approx(found.step_s)


def test_a_block_costs_what_its_own_window_shows_it():
    sizes = {"model_type": "qwen3", "head_dim": 128, "sliding_window": 512}
    kinds = ("sliding_attention", "full_attention")
    model = replace(
        LLAMA_7B, **sizes, num_hidden_layers=4, layer_types=(kinds[0], kinds[0], kinds[0], kinds[1])
    )

    def forward_of(model):
        job = replace(JOB, model=model, sequence_length=32_768)
        return [unit.forward for unit in units_of(job, A100, FITTED)]

    near, whole = (forward_of(replace(model, layer_types=(kind,) * 4)) for kind in kinds)
    found = forward_of(model)
    assert found[:4] == pytest.approx([*near[:3], whole[3]], rel=0.01)  # collectives beside it take 0.2%
    assert whole[3] > 1.5 * near[3]


def test_the_widest_part_is_named():
    slow = replace(A100, nics=1, nic_gbit_s=1.0)
    assert predict(replace(JOB, layout=RankLayout(shard=128)), slow).limit == "the network"
    assert predict(JOB, A100).limit == "computing"
    assert predict(replace(JOB, data_tokens_per_s=100.0), A100).limit == "the loader"


@pytest.mark.parametrize("keep_mib", [0.0, math.inf])
def test_breadth_first_more_compute_hides_the_bytes_of_one_micro_batch(keep_mib):
    slow = replace(A100, nics=1, nic_gbit_s=20.0, straggling=0.0)
    depth = replace(JOB, layout=RankLayout(shard=128), num_micro_batches=8, keep_mib=keep_mib)
    breadth = replace(depth, schedule="breadth_first")
    one, before, after = (predict(job, slow) for job in (replace(depth, num_micro_batches=1), depth, breadth))
    assert after.network_bytes == pytest.approx(one.network_bytes)
    assert after.compute_s == pytest.approx(before.compute_s, rel=0.1)  # less is beside it, and slows it
    assert after.compute_s < after.step_s < before.step_s
    assert after.exposed_s["network"] < before.exposed_s["network"]


def test_compressed_gradients_between_nodes_are_a_quarter_of_the_bytes():
    whole, coded = (predict(replace(JOB, reduce=codec), A100) for codec in ("float32", "int8"))
    assert coded.network_bytes == pytest.approx(whole.network_bytes * (8 + 32 / 128) / 32)


def test_copies_that_meet_every_fifty_steps_send_little():
    often, seldom = predict(JOB, A100), predict(replace(JOB, outer_every=50, outer_bits=4), A100)
    assert seldom.network_bytes == pytest.approx(often.network_bytes * (4 + 32 / 128) / 16 / 50, rel=0.01)


def test_a_step_that_sends_only_for_tensor_parallelism_waits_for_lost_segments_too():
    two_hosts = replace(A100, nodes=2, devices_per_node=1, transport="tcp")
    job = replace(JOB, layout=RankLayout(tensor=2))
    found, without = (predict(job, cluster) for cluster in (two_hosts, replace(two_hosts, straggling=0.0)))
    assert found.network_bytes == pytest.approx(without.network_bytes)
    assert found.straggler_s > without.straggler_s == 0


def test_a_pipeline_of_one_micro_batch_mostly_waits():
    job = replace(JOB, layout=RankLayout(pipeline=8, shard=16), messages_overlapped=True)
    few, many = (predict(replace(job, num_micro_batches=n), A100) for n in (8, 64))
    assert few.bubble_s / few.step_s == pytest.approx(7 / 15, rel=0.2)
    assert many.bubble_s / many.step_s < 0.12


def test_every_micro_batch_of_every_stage_waits_for_two_messages_unless_they_are_overlapped():
    job = replace(JOB, layout=RankLayout(pipeline=8, shard=16), num_micro_batches=64)
    waits = [
        predict(replace(job, stages_per_rank=stages), A100).bubble_s
        - predict(replace(job, stages_per_rank=stages, messages_overlapped=True), A100).bubble_s
        for stages in (1, 2)
    ]
    assert waits[1] == pytest.approx(2 * waits[0])
    one_message_s = (
        2 * 4096 * 4096 * 2 / (A100.node_bytes_s / 8)
    )  # of rows x tokens x width; 8 groups share NICs
    assert waits[0] == pytest.approx(64 * 2 * one_message_s, rel=0.01)


@pytest.mark.parametrize("stages_per_rank", [1, 2])
@pytest.mark.parametrize("pipeline", [2, 4, 8])
def test_two_nodes_send_what_crosses_between_them_however_many_stages_each_holds(pipeline, stages_per_rank):
    layout = RankLayout(pipeline=pipeline, tensor=16 // pipeline)
    job = replace(JOB, layout=layout, num_micro_batches=16, stages_per_rank=stages_per_rank)
    one_message = 2 * 4096 * 4096 * 2  # rows x tokens x width, in bfloat16
    crossings = 2 * stages_per_rank - 1  # the first stage sends none backward, the last none forward
    assert predict(job, replace(A100, nodes=2)).network_bytes == 16 * crossings * one_message


def test_with_little_memory_left_each_gather_waits_for_the_allocator():
    layout = RankLayout(shard=128)
    job, gib = replace(JOB, layout=layout, num_micro_batches=2), 2**30
    plenty, tight = (predict(job, A100, memory_bytes=size * gib) for size in (70, 76))
    assert plenty == predict(job, A100)
    assert tight.stall_s > 0.5
    assert tight.step_s > plenty.step_s + 0.9 * tight.stall_s
    cpu = replace(A100, device=replace(DEVICES["CPU"], memory_gib=80))
    assert not predict(job, cpu, memory_bytes=76 * gib).stall_s


def test_lost_segments_cost_more_the_more_nodes_send_and_nothing_over_rdma():
    over_tcp = replace(A100, transport="tcp", nics=2, nic_gbit_s=100)

    def late_s(nodes, **changes):
        job = replace(JOB, layout=RankLayout(shard=8 * nodes))
        return predict(job, replace(over_tcp, nodes=nodes, **changes)).straggler_s

    lost = {nodes: late_s(nodes) - late_s(nodes, transport="rdma") for nodes in (2, 32, 64, 4096)}
    assert lost[2] < 0.2
    assert lost[64] == pytest.approx(2 * lost[32], rel=0.1)
    assert lost[4096] < 3 * 33 * 0.2, "at most one timeout for each collective of 32 blocks and the head"
    assert late_s(64, straggling=0.0) == 0, "what was measured stands for all"


def test_a_pipeline_is_as_slow_as_its_last_rank_which_has_the_output_matrix():
    job = replace(JOB, layout=RankLayout(pipeline=4, shard=32), num_micro_batches=32)
    events = timeline_of(job, A100, record=True).events
    names = {event.name for event in events}
    assert names == {f"block {index}" for index in range(24, 32)} | {"head"}


def test_float8_products_are_faster_only_where_there_are_some():
    hopper = replace(A100, device=DEVICES["H100-80GB"])
    large = replace(JOB, model=LLAMA_70B, layout=RankLayout(shard=128), micro_batch_size=4)
    times = [
        predict(replace(large, linear=linear), hopper).step_s for linear in ("compute", "float8_tensorwise")
    ]
    assert 0.55 < times[1] / times[0] < 0.8
    with pytest.raises(ConfigError, match=r"not modelled on A100-80GB \(got 'float8_tensorwise'\)"):
        predict(replace(JOB, linear="float8_tensorwise"), A100)


def test_a_layout_of_another_size_is_refused():
    with pytest.raises(ConfigError, match="8 ranks, and the cluster 128 devices"):
        predict(replace(JOB, layout=RankLayout(shard=8)), A100)


def test_synchronising_one_copy_is_refused():
    with pytest.raises(ConfigError, match="there is only one"):
        predict(replace(JOB, layout=RankLayout(shard=128), outer_every=10), A100)


def test_eighty_blocks_are_simulated_once_whatever_the_micro_batches():
    job = replace(JOB, model=LLAMA_70B, layout=RankLayout(shard=128), num_micro_batches=500)
    events = timeline_of(job, A100, record=True).events
    assert len(events) < 3 * 2 * 81 * 3


def test_gloo_uses_several_cards_only_where_collectives_are_cut_into_pieces():
    hosts = Cluster(nodes=2, devices_per_node=1, device=DEVICES["CPU"], nics=2, nic_gbit_s=0.2)
    job = replace(JOB, layout=RankLayout(shard=2), compute="float32", micro_batch_size=1)
    both, one = (timeline_of(replace(job, operations=n), hosts).busy_s["network"] for n in (0, 1))
    assert one > 1.8 * both


def test_only_what_tensor_parallelism_sends_hides_behind_products():
    node = replace(A100, nodes=1)
    job = replace(JOB, layout=RankLayout(context=2, tensor=4), tensor_overlapped=True)
    block, *_ = units_of(job, node, replace(FITTED, hidden=1.0))
    keys_and_values = job.rows_tokens / 4 * 2 * 4096 * 2  # tokens x both x width, in bfloat16
    gather = ring(keys_and_values, groups_of(job.layout, node)["context"], node)
    assert block.inline == block.inline_back == gather.seconds
