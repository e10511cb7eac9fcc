"""Steps by compiled programs: the same numbers, and no request that waits for the compiler."""

import gc
import threading
import weakref

import pytest
import torch
from tests.compiled_cases import (
    NUM_LAYERS,
    STEPS,
    Recorder,
    compiled_steps,
    engine_parts,
    graphs_of,
    in_two_groups,
    logits_of,
)
from tests.families import ministral3_scaling
from torch._dynamo.backends.debugging import aot_eager

from penstock.core.errors import ConfigError
from penstock.engine.model_runner.compiled_steps import is_wanted
from penstock.nn import native
from penstock.nn.kernels import paged

pytestmark = pytest.mark.skipif(not native.is_available(), reason="compiled steps need the operators")


COMPUTED: list[int] = []
"""Tokens of each block that a program has computed."""


def counting(graph, inputs):
    """One backend for all tests, which then share programs as the engines of a process do."""
    program = aot_eager(graph, inputs)

    def run(*args):
        COMPUTED.append(max(t.shape[1] for t in args if isinstance(t, torch.Tensor) and t.ndim == 3))
        return program(*args)

    return run


def compiled_at_once(parts, *, sizes=(1, 2, 3, 4, 8, 16, 20), **options):
    """Steps whose programs are there; fewer of them where one is enough, because each takes its time."""
    assert compiled_steps(counting, parts)._sizes == [1, 2, 3, 4, 8, 16, 20]
    compiled = compiled_steps(counting, parts, sizes=sizes, **options)
    compiled.compile_all()
    assert compiled.ready == set(sizes)
    COMPUTED.clear()
    return compiled


def assert_close(ours, theirs):
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)  # float32, sums in another order


@pytest.mark.parametrize("weights", ["stored", "int8"])
def test_programs_compute_what_plain_code_does(weights):
    parts = engine_parts(weights)
    compiled = compiled_at_once(parts)
    assert_close(logits_of(*parts, compiled), logits_of(*engine_parts(weights)))
    sizes = [16, 3, 2, 1, 3, 3, 1, 8, 20, 4]
    assert [size for size in sizes for _ in range(NUM_LAYERS)] == COMPUTED


def test_programs_compute_what_plain_code_does_where_pytorch_attends(monkeypatch):
    monkeypatch.setattr(paged, "MAX_GROUP", 0)
    parts = engine_parts()
    compiled = compiled_at_once(parts, sizes=[20])
    assert_close(logits_of(*parts, compiled), logits_of(*engine_parts()))
    assert len(COMPUTED) == NUM_LAYERS * len(STEPS)


def test_blocks_with_windows_of_their_own_are_computed_by_programs_of_their_own():
    windows = {"model_type": "qwen2", "sliding_window": 3, "max_window_layers": 1}
    parts = engine_parts(**windows)
    compiled = compiled_at_once(parts, sizes=[20])
    assert_close(logits_of(*parts, compiled), logits_of(*engine_parts(**windows)))
    assert len(COMPUTED) == NUM_LAYERS * len(STEPS)


def test_programs_read_the_slots_and_tables_of_each_cache_group():
    windows = {"model_type": "qwen2", "sliding_window": 3, "max_window_layers": 1}
    parts = engine_parts(**windows, groups=[[1], [0]])
    compiled = compiled_at_once(parts, sizes=[20])
    found = logits_of(*parts, compiled, steps=[in_two_groups(step) for step in STEPS])
    assert_close(found, logits_of(*engine_parts(**windows)))
    assert len(COMPUTED) == NUM_LAYERS * len(STEPS)


FAMILIES = {
    "smollm3": {"layer_rope_theta": (0.0, 10_000.0)},
    "ministral3": {"rope_scaling": ministral3_scaling()},
    "hunyuan_v1_dense": {},
    "gemma2": {"attn_logit_softcapping": 0.05, "final_logit_softcapping": 0.2},
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_one_program_computes_all_blocks_of_a_family(model_type):
    changes = {"model_type": model_type, **FAMILIES[model_type]}
    parts = engine_parts(**changes)
    programs = []

    def counted(graph, inputs):
        programs.append(graph)
        return aot_eager(graph, inputs)

    compiled = compiled_steps(counted, parts, sizes=[20])
    compiled.compile_all()
    assert_close(logits_of(*parts, compiled), logits_of(*engine_parts(**changes)))
    assert len(programs) == 1
    assert not torch.allclose(logits_of(*parts, compiled)[0], logits_of(*engine_parts())[0], atol=1e-3)


def test_filling_leaves_the_pages_as_they_are():
    parts = engine_parts()
    parts[1].pages.normal_()
    before = parts[1].pages.clone()
    compiled_at_once(parts, sizes=[20])
    assert torch.equal(parts[1].pages, before)


def test_each_engine_writes_to_its_own_pages():
    """They share programs, which know no pages."""
    first, second = engine_parts(), engine_parts()
    for parts in (first, second):
        compiled = compiled_at_once(parts, sizes=[20])
    logits_of(*second, compiled)
    assert second[1].pages.any()
    assert not first[1].pages.any()


def test_pages_are_freed_with_their_engine():
    parts = engine_parts()
    compiled = compiled_at_once(parts, sizes=[20])
    logits_of(*parts, compiled)
    pages = weakref.ref(parts[1])
    del parts, compiled
    gc.collect()
    assert pages() is None


def test_no_step_asks_the_host_for_numbers():
    """On a device that has none, as a GPU does not while a graph is recorded."""
    model, cache = engine_parts(device="meta")
    compiled = compiled_at_once((model, cache), sizes=[3, 20])
    assert all(logits.is_meta for logits in logits_of(model, cache, compiled))
    assert len(COMPUTED) == NUM_LAYERS * len(STEPS)
    graphs = graphs_of(model, cache, compiled, record=(record := Recorder()))
    assert all(logits.is_meta for logits in logits_of(model, cache, compiled, graphs=graphs))
    assert len(record.replayed) == 6


def test_a_program_of_any_number_of_tokens_computes_steps_with_prompts():
    parts = engine_parts()
    compiled = compiled_at_once(parts, sizes=[1], has_any=True)
    assert_close(logits_of(*parts, compiled), logits_of(*engine_parts()))
    sizes = [14, 3, 2, 1, 3, 3, 1, 7, 20, 4]  # nothing is padded
    assert [size for size in sizes for _ in range(NUM_LAYERS)] == COMPUTED


def test_graphs_of_compiled_programs_compute_what_plain_code_does():
    parts = engine_parts()
    compiled = compiled_at_once(parts, sizes=[1], has_any=True)
    graphs = graphs_of(*parts, compiled, record=(record := Recorder()))
    assert [size for size in (3, 3, 2, 2, 1, 1) for _ in range(NUM_LAYERS)] == COMPUTED
    assert_close(logits_of(*parts, compiled, graphs=graphs), logits_of(*engine_parts()))
    assert record.replayed == [3, 2, 1, 3, 3, 1]


def test_steps_are_plain_until_their_program_is_ready():
    began, go_on = threading.Event(), threading.Event()

    def slow(graph, _):
        began.set()
        assert go_on.wait(100)
        return graph.forward

    parts = engine_parts()
    compiled = compiled_steps(slow, parts)
    compiled.start()
    assert began.wait(100)
    try:
        during = logits_of(*parts, compiled)
        assert not compiled.ready
    finally:
        closing = threading.Thread(target=compiled.close)
        closing.start()
        assert compiled._stop.wait(100)
        go_on.set()
        closing.join(100)
    assert compiled.ready == {1}  # to close waits for the program in the making, and for no other
    for ours, theirs in zip(during, logits_of(*engine_parts()), strict=True):
        assert torch.equal(ours, theirs)


def test_a_network_that_was_changed_since_is_computed_plainly():
    parts = engine_parts()
    compiled = compiled_at_once(parts, sizes=[20])
    compiled._is_plain = lambda: False
    for ours, theirs in zip(logits_of(*parts, compiled), logits_of(*engine_parts()), strict=True):
        assert torch.equal(ours, theirs)
    assert not COMPUTED


def test_a_step_that_no_program_fits_any_more_compiles_nothing():
    """Such as after the number of threads was changed, which programs depend on."""
    parts = engine_parts()
    compiled = compiled_at_once(parts, sizes=[20])
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert_close(logits_of(*parts, compiled), logits_of(*engine_parts()))
    finally:
        torch.set_num_threads(threads)
    assert not COMPUTED


@pytest.mark.parametrize(
    ("asked", "device", "has_graphs", "wanted"),
    [
        ("off", "cuda", False, False),
        ("auto", "cpu", False, False),
        ("auto", "cuda", True, True),
        ("auto", "cuda", False, False),  # of several ranks, or batch-invariant
        ("on", "cpu", False, True),
        ("on", "cuda", True, True),
    ],
)
def test_steps_are_compiled_where_they_are_graphs_and_where_it_was_asked_for(
    asked, device, has_graphs, wanted
):
    found = is_wanted(asked, has_graphs=has_graphs, device=torch.device(device), ranks=1)
    assert found is wanted


def test_ranks_are_not_compiled():
    with pytest.raises(
        ConfigError, match=r"compile=on supports one process only \(got 'tensor_parallel=2'\)"
    ):
        is_wanted("on", has_graphs=False, device=torch.device("cpu"), ranks=2)


def test_a_compiler_that_fails_leaves_plain_code(caplog):
    def broken(_, __):
        raise RuntimeError("no such instruction")

    parts = engine_parts()
    compiled = compiled_steps(broken, parts)
    compiled.start()
    compiled.wait()
    assert not compiled.ready
    assert "Steps of 1 token could not be compiled" in caplog.text
    assert all(logits.isfinite().all() for logits in logits_of(*parts, compiled))
    compiled.close()
    compiled.close()
