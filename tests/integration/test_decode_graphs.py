"""CUDA graphs of decode steps, without a GPU: the recorder computes again from the tensors of a graph."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.compiled_cases import (
    BLOCK_SIZE,
    MAX_BLOCKS,
    MAX_SEQUENCES,
    STEPS,
    Recorder,
    engine_parts,
    graphs_of,
    in_two_groups,
    logits_of,
    runner_of,
    step_of,
)

from penstock.core.units import plural
from penstock.engine.assemble import engine_of
from penstock.engine.config import EngineConfig
from penstock.engine.model_runner.decode_graphs import are_wanted
from penstock.engine.request import Request
from penstock.engine.sampling.filters import sample, settings_tensor
from penstock.engine.sampling_params import GREEDY, Sampling
from penstock.nn import native

pytestmark = pytest.mark.skipif(not native.is_available(), reason="plain attention asks the host for lengths")

DECODING = [step for step in STEPS if len(step.token_ids) == len(step.lengths)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "smollm3", "layer_rope_theta": (0.0, 10_000.0)},
        {"model_type": "gemma2", "attn_logit_softcapping": 0.05, "final_logit_softcapping": 0.2},
    ],
)
def test_decode_steps_are_replayed_and_compute_what_plain_code_does(changes):
    parts = engine_parts(**changes)
    graphs = graphs_of(*parts, record=(record := Recorder()))
    found = logits_of(*parts, graphs=graphs)
    for ours, theirs in zip(found, logits_of(*engine_parts(**changes)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # float32, sums in another order
    assert record.replayed == [3, 2, 1, 3, 3, 1]


def test_a_graph_reads_the_slots_and_tables_of_each_cache_group():
    windows = {"model_type": "qwen2", "sliding_window": 3, "max_window_layers": 1}
    parts = engine_parts(**windows, groups=[[1], [0]])
    graphs = graphs_of(*parts, record=(record := Recorder()))
    found = logits_of(*parts, graphs=graphs, steps=[in_two_groups(step) for step in STEPS])
    for ours, theirs in zip(found, logits_of(*engine_parts(**windows)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # float32, sums in another order
    assert len(record.replayed) == len(DECODING)


def test_all_graphs_are_recorded_before_the_first_step_the_largest_first():
    parts = engine_parts()
    graphs = graphs_of(*parts, record=(record := Recorder()))
    assert record.recorded == [3, 3, 2, 2, 1, 1]  # of each size one that samples and one that does not
    logits_of(*parts, graphs=graphs)  # tables of 2, 4 and 8 blocks
    assert len(record.recorded) == 6
    assert graphs.sizes == [1, 2, 3]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(top_p=0.9), Sampling(temperature=3.0, top_k=7)])
def test_a_graph_samples_the_tokens_that_the_sampler_does(sampling):
    parts = engine_parts()
    runner = runner_of(*parts)
    runner._graphs = graphs_of(*parts, record=Recorder(), sizes=[MAX_SEQUENCES])
    runner.run(STEPS[0])
    for number, step in enumerate(DECODING):
        count = len(step.token_ids)
        numbers = np.random.default_rng(number).random(count).tolist()
        settings = None if sampling is GREEDY else settings_tensor([sampling] * count, numbers)
        output = runner.run(step, settings)
        assert output.drawn is not None
        assert output.drawn() == sample(output.logits, settings).tolist()


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step_of([1, 6], [9, 3]), id="a prompt"),
        pytest.param(step_of([1, 1, 1, 1], [9, 3, 4, 5]), id="more sequences than any graph has"),
        pytest.param(
            replace(DECODING[0], adapters=np.array([-1, 0, -1], np.int32)), id="an adapter of one sequence"
        ),
        pytest.param(replace(DECODING[0], logit_rows=np.array([0, 2])), id="a sequence that is not sampled"),
    ],
)
def test_other_steps_are_plain(step):
    parts = engine_parts()
    graphs = graphs_of(*parts, record=Recorder())
    assert not graphs.takes(step, None)


def test_padding_rows_write_to_no_block_of_a_sequence():
    parts = engine_parts()
    runner = runner_of(*parts)
    runner._graphs = graphs_of(*parts, record=(record := Recorder()), sizes=[MAX_SEQUENCES])
    for step in (step_of([1, 1, 1], [3, 2, 1]), step_of([1], [5])):
        parts[1].pages.zero_()
        runner.run(step)
        written = parts[1].pages[:, :, :-1].abs().sum(dim=(0, 1, 3, 5)).nonzero()
        blocks = [(slot // BLOCK_SIZE, slot % BLOCK_SIZE) for slot in step.slots[0].tolist()]
        assert [tuple(place) for place in written.tolist()] == blocks
    assert record.replayed == [MAX_SEQUENCES] * 2


def test_recording_leaves_the_blocks_of_sequences_as_they_are():
    parts = engine_parts()
    parts[1].pages.normal_()
    before = parts[1].pages.clone()
    graphs_of(*parts, record=Recorder())
    assert torch.equal(parts[1].pages[:, :, :-1], before[:, :, :-1])


class Full(Recorder):
    """A device without memory for graphs of more than `most` rows, which says so in the words of `error`."""

    def __init__(self, most, error):
        super().__init__()
        self._most, self._error = most, error

    def __call__(self, compute):
        replay = super().__call__(compute)
        if self.recorded[-1] > self._most:
            raise self._error
        return replay


FULL = [
    pytest.param(torch.OutOfMemoryError("CUDA out of memory"), id="of the allocator"),
    pytest.param(RuntimeError("CUDA error: out of memory"), id="of the driver, at the end of a capture"),
]


@pytest.mark.parametrize("error", FULL)
def test_a_graph_that_does_not_fit_is_left_out_and_said(error, caplog):
    parts = engine_parts()
    graphs = graphs_of(*parts, record=Full(2, error))
    assert graphs.sizes == [1, 2]
    assert "No memory for the graph of 3 sequences" in caplog.text
    found = logits_of(*parts, graphs=graphs)
    for ours, theirs in zip(found, logits_of(*engine_parts()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class Breaking(Recorder):
    """A device whose driver fails at the graph number `at`."""

    def __init__(self, at):
        super().__init__()
        self._at = at

    def __call__(self, compute):
        if len(self.recorded) == self._at:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().__call__(compute)


@pytest.mark.parametrize(("at", "sizes"), [(0, []), (1, []), (2, [3]), (5, [2, 3])])
def test_after_a_failure_the_graphs_that_were_recorded_stay(at, sizes, caplog):
    parts = engine_parts()
    graphs = graphs_of(*parts, record=Breaking(at))
    assert graphs.sizes == sizes
    assert f"Steps of {plural(3 - at // 2, 'sequence')} or fewer have no graph" in caplog.text
    for ours, theirs in zip(logits_of(*parts, graphs=graphs), logits_of(*engine_parts()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_results_of_all_graphs_lie_in_one_place():
    parts = engine_parts()
    graphs = graphs_of(*parts, record=Recorder())
    found = [graphs.run(step, None) for step in DECODING[:3]]
    assert {output.logits.data_ptr() for output in found} == {found[0].logits.data_ptr()}
    assert [len(output.logits) for output in found] == [3, 2, 1]


def test_a_step_reads_the_ids_that_the_step_before_drew():
    one, two = DECODING[1], DECODING[4]
    ours, theirs = (runner_of(*engine_parts()) for _ in range(2))
    for runner in (ours, theirs):
        runner.record(max_sequences=MAX_SEQUENCES, max_blocks=MAX_BLOCKS, record=Recorder())
        runner.run(STEPS[0])
    unread, read = ours.run(one, None), theirs.run(one, None)
    ids = read.drawn()
    swapped = [1, 0, 1]
    found = ours.run(replace(two, token_ids=np.array([~row for row in swapped])), None)
    expected = theirs.run(replace(two, token_ids=np.array([ids[row] for row in swapped])), None)
    assert torch.equal(found.logits, expected.logits)
    assert unread.drawn() == ids  # read after the next step has drawn
    assert found.drawn() == expected.drawn()


def small_engine():
    model, _ = engine_parts()
    context = MAX_BLOCKS * BLOCK_SIZE
    return engine_of(model, EngineConfig(block_size=BLOCK_SIZE, max_sequences=4, max_context=context))


REQUESTS = [
    Request(prompt=(3, 4, 5), max_tokens=9, sampling=GREEDY),
    Request(prompt=(7,), max_tokens=12, sampling=Sampling(seed=1)),
    Request(prompt=(9, 8, 7, 6, 5), max_tokens=5, sampling=Sampling(num_logprobs=2, temperature=2.0)),
    Request(prompt=(11, 12), max_tokens=8, sampling=Sampling(frequency_penalty=1.5, min_tokens=4)),
    Request(prompt=(13, 2), max_tokens=7, sampling=Sampling(allowed_token_ids=(4, 8, 30), temperature=1.5)),
]
"""Greedy, sampled, with log-probabilities, and with logits that are changed before they are sampled."""


def answers(engine):
    ids = [engine.add(request) for request in REQUESTS]
    told = {request_id: ([], []) for request_id in ids}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            told[delta.request_id][0].extend(delta.token_ids)
            told[delta.request_id][1].extend(each.rank for each in delta.logprobs)
    engine.close()
    return [told[request_id] for request_id in ids]


def test_an_engine_with_graphs_answers_as_one_without():
    engine = small_engine()
    engine.runner.record(max_sequences=4, max_blocks=MAX_BLOCKS, record=(record := Recorder()))
    assert answers(engine) == answers(small_engine())
    assert len(record.replayed) > 8


@pytest.mark.parametrize(("asked", "ranks"), [("off", 1), ("auto", 1), ("on", 1), ("auto", 2)])
def test_a_cpu_records_no_graphs(asked, ranks):
    assert not are_wanted(asked, device=torch.device("cpu"), ranks=ranks)
