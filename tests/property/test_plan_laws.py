"""Laws of the performance model that hold for every job: no knob helps that cannot, no byte is lost."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.devices.figures import DEVICES
from penstock.models.decoder.config import DecoderConfig
from penstock.parallel.layout import RankLayout
from penstock.plan.hardware import Cluster
from penstock.plan.job import TrainingStep
from penstock.plan.predict import predict, timeline_of
from tests.examples import examples

SLACK = 1 + 1e-9


@st.composite
def jobs(draw, *, pipelines=True):
    """Return a job and the cluster it fills."""
    nodes, per_node = draw(st.sampled_from([(1, 8), (2, 1), (2, 4), (4, 8), (8, 2)]))
    ranks = nodes * per_node
    tensor = draw(st.sampled_from([n for n in (1, 2, 4) if per_node % n == 0]))
    pipeline = draw(st.sampled_from([1, 2])) if pipelines and ranks // tensor % 2 == 0 else 1
    rest = ranks // tensor // pipeline
    shard = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
    hidden = draw(st.sampled_from([256, 1024, 4096]))
    model = DecoderConfig(
        vocab_size=32_000,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=draw(st.integers(2, 12)),
        num_attention_heads=hidden // 64,
    )
    schedule = draw(st.sampled_from(["depth_first", "breadth_first"])) if pipeline == 1 else "depth_first"
    job = TrainingStep(
        model=model,
        schedule=schedule,
        layout=RankLayout(pipeline=pipeline, replicate=rest // shard, shard=shard, tensor=tensor),
        sequence_length=draw(st.sampled_from([512, 2048])),
        micro_batch_size=draw(st.integers(1, 4)),
        num_micro_batches=draw(st.integers(1, 9)),
        modes=draw(st.sampled_from(["keep", "operators", "full"])),
        reshard_after_forward=draw(st.booleans()),
        gather=draw(st.sampled_from(["compute", "int8"])),
        kernels=draw(st.sampled_from(["eager", "fused", "compiled"])),
        overlapped=draw(st.booleans()),
    )
    cluster = Cluster(
        nodes=nodes,
        devices_per_node=per_node,
        device=DEVICES[draw(st.sampled_from(["A100-80GB", "H100-80GB", "CPU", "L40S"]))],
        nics=draw(st.integers(1, 2)),
        nic_gbit_s=draw(st.sampled_from([0.2, 1.0, 10.0, 100.0])),
        latency_us=draw(st.sampled_from([0.0, 20.0, 500.0])),
    )
    return job, cluster


@given(jobs())
@examples(60)
def test_more_network_is_never_slower(drawn):
    job, cluster = drawn
    step = predict(job, cluster).step_s
    assert predict(job, replace(cluster, nics=2 * cluster.nics)).step_s <= step * SLACK
    assert predict(job, replace(cluster, latency_us=cluster.latency_us / 2)).step_s <= step * SLACK


@given(jobs(pipelines=False))
@examples(60)
def test_a_window_of_one_block_is_never_faster_than_one_of_two(drawn):
    job, cluster = drawn
    block = job.largest_block * job.compute_bytes / job.layout.tensor / 2**20
    one, two = (predict(replace(job, window_mib=n * block * 1.01), cluster).step_s for n in (1, 2))
    assert two <= one * SLACK


@given(jobs(pipelines=False))
@examples(60)
def test_no_step_is_shorter_than_its_computing_or_than_any_link_is_busy(drawn):
    job, cluster = drawn
    line = timeline_of(job, cluster)
    assert line.seconds * SLACK >= line.compute_s
    for busy in line.busy_s.values():
        assert line.seconds * SLACK >= busy


@given(jobs(pipelines=False))
@examples(60)
def test_overlap_hides_at_most_the_computing_and_one_link_behind_the_other(drawn):
    job, cluster = drawn
    line = timeline_of(replace(job, overlapped=True), cluster)
    hidden = sum(line.busy_s.values()) - sum(line.exposed_s.values())
    assert hidden <= (line.compute_s + min(line.busy_s.values())) * SLACK


@given(st.sampled_from([2, 4, 8]), st.integers(1, 6), st.booleans())
def test_bytes_on_the_wire_are_those_of_the_arithmetic(ranks, parts, kept):
    """The planner's page: (2 M P + M G) (W - 1) / W resharded every time, (P + G) (W - 1) / W kept."""
    model = DecoderConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=6, num_attention_heads=2
    )
    cluster = Cluster(nodes=ranks, devices_per_node=1, device=DEVICES["A100-80GB"])
    job = TrainingStep(
        model=model,
        layout=RankLayout(shard=ranks),
        sequence_length=64,
        num_micro_batches=parts,
        keep_mib=float("inf") if kept else 0.0,
    )
    in_blocks = job.in_blocks(model.layers)
    gathers = 2 * in_blocks + job.outside  # what lies outside of blocks stays until its backward
    weights, gradients = job.compute_bytes * gathers, 4 * model.num_parameters
    once = job.compute_bytes * model.num_parameters
    expected = once + gradients if kept else parts * (weights + gradients)
    sent = predict(job, cluster).network_bytes
    assert sent == pytest.approx(expected * (ranks - 1) / ranks, rel=1e-3)


@given(jobs(pipelines=False))
@examples(60)
def test_breadth_first_sends_what_one_micro_batch_does(drawn):
    job, cluster = drawn
    one = predict(replace(job, num_micro_batches=1), cluster)
    breadth = predict(replace(job, schedule="breadth_first"), cluster)
    if job.layout.tensor == 1:
        assert breadth.network_bytes == pytest.approx(one.network_bytes)
    assert breadth.compute_s * SLACK >= one.compute_s


@given(jobs(pipelines=False))
@examples(60)
def test_keeping_everything_never_sends_more(drawn):
    job, cluster = drawn
    plain = predict(job, cluster).network_bytes
    assert predict(replace(job, keep_mib=float("inf")), cluster).network_bytes <= plain * SLACK
