"""Steps by compiled programs: the same numbers, and no request that waits for the compiler."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from tests.families import small_llama
from torch._dynamo.backends.debugging import aot_eager

from penstock.core.errors import ConfigError
from penstock.engine.adapters import Adapters
from penstock.engine.batch import Batch
from penstock.engine.compiled import CompiledSteps, is_wanted
from penstock.engine.decode_graphs import DecodeGraphs
from penstock.engine.fuse import fuse
from penstock.engine.kv_cache import PagedCache
from penstock.engine.runner import Runner
from penstock.engine.weights import prepare
from penstock.models.llama.model import Llama
from penstock.nn import native
from penstock.nn.kernels import paged

NUM_LAYERS = 2
BLOCK_SIZE, MAX_BLOCKS, MAX_SEQUENCES, MAX_TOKENS = 4, 8, 3, 20

pytestmark = pytest.mark.skipif(not native.is_available(), reason="compiled steps need the operators")


def engine_parts(weights="stored", *, device="cpu", **windows):
    torch.manual_seed(5)
    config = small_llama(
        vocab_size=50,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_BLOCKS * BLOCK_SIZE,
        **windows,
    )
    model = Llama(config).eval().to(device)
    fuse(model)
    prepare(model, weights)
    cache = PagedCache(
        NUM_LAYERS,
        num_blocks=MAX_SEQUENCES * MAX_BLOCKS + 1,
        block_size=BLOCK_SIZE,
        kv_heads=1,
        head_dim=16,
        dtype=torch.float32,
        device=torch.device(device),
    )
    return model, cache


def step_of(sizes, starts):
    """A step in which share i computes so many tokens of sequence i, whose blocks follow each other."""
    positions = [np.arange(start, start + size) for size, start in zip(sizes, starts, strict=True)]
    slots = [p + i * MAX_BLOCKS * BLOCK_SIZE for i, p in enumerate(positions)]
    lengths = np.array([p[-1] + 1 for p in positions], dtype=np.int32)
    tables = np.arange(len(sizes) * MAX_BLOCKS, dtype=np.int32).reshape(len(sizes), MAX_BLOCKS)
    ends = np.cumsum([0, *sizes]).astype(np.int32)
    whole = np.concatenate(positions)
    return Batch(
        token_ids=(whole * 7 + 3) % 50,
        positions=whole,
        slots=np.concatenate(slots),
        query_starts=ends,
        lengths=lengths,
        block_tables=tables[:, : -(-int(lengths.max()) // BLOCK_SIZE)],
        logit_rows=(ends[1:] - 1).astype(np.int64),
        adapters=np.full(len(sizes), -1, dtype=np.int32),
    )


STEPS = [step_of([5, 2, 7], [0, 0, 0])]
STEPS += [step_of([1] * count, [5 + i, 2 + i, 7 + i][:count]) for i, count in enumerate([3, 2, 1, 3, 3, 1])]
STEPS += [step_of([1, 6], [9, 3]), step_of([20], [0]), step_of([1, 1, 2], [20, 9, 12])]
"""Prompts, answers in the making, and both; a program has tokens to spare, or shares, or neither."""


def logits_of(model, cache, forward=None):
    runner = Runner(model, cache, Adapters(model, model.config), forward=forward)
    return [runner.run(step).logits for step in STEPS]


def compiled_steps(backend, parts):
    sizes = {"max_sequences": MAX_SEQUENCES, "max_tokens": MAX_TOKENS, "max_blocks": MAX_BLOCKS}
    return CompiledSteps(*parts, **sizes, backend=backend)


COMPUTED: list[int] = []
"""Tokens of each block that a program has computed."""


def counting(graph, inputs):
    """One backend for all tests, which then share programs as the engines of a process do."""
    program = aot_eager(graph, inputs)

    def run(*args):
        COMPUTED.append(max(t.shape[1] for t in args if isinstance(t, torch.Tensor) and t.ndim == 3))
        return program(*args)

    return run


def compiled_at_once(parts, *, sizes=(1, 2, 3, 4, 8, 16, 20)):
    """Steps whose programs are there; fewer of them where one is enough, because each takes its time."""
    compiled = compiled_steps(counting, parts)
    assert compiled._sizes == [1, 2, 3, 4, 8, 16, 20]
    compiled._sizes = list(sizes)
    compiled.start()
    compiled.wait()
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
    compiled._graphs, replayed = graphs_of(compiled, cache)
    assert all(logits.is_meta for logits in logits_of(model, cache, compiled))
    assert replayed


def graphs_of(compiled, cache):
    """Graphs that compute again what they have recorded, from the same tensors."""
    replayed = []

    def record(compute):
        compute()
        return lambda: replayed.append(compute()) or replayed[-1]

    return DecodeGraphs(compiled._compute, cache, max_blocks=MAX_BLOCKS, record=record), replayed


def test_steps_of_decoding_are_replayed_from_tensors_of_the_graph():
    parts = engine_parts()
    compiled = compiled_at_once(parts)
    compiled._graphs, replayed = graphs_of(compiled, parts[1])
    assert_close(logits_of(*parts, compiled), logits_of(*engine_parts()))
    assert [hidden.shape[1] for hidden in replayed] == [3, 2, 1, 3, 3, 1]
    # three answers and one, each with tables of 2, 4 and 8 blocks
    assert set(compiled._graphs._graphs) <= {(n, width) for n in (1, 2, 3) for width in (2, 4, 8)}
    assert len(compiled._graphs._graphs) < len(replayed)


def test_spare_rows_of_a_graph_write_to_no_block_of_a_sequence():
    parts = engine_parts()
    compiled = compiled_at_once(parts, sizes=[MAX_SEQUENCES])
    compiled._graphs, replayed = graphs_of(compiled, parts[1])
    runner = Runner(parts[0], parts[1], Adapters(parts[0], parts[0].config), forward=compiled)
    for step in (step_of([1, 1, 1], [3, 2, 1]), step_of([1], [5])):
        parts[1].pages.zero_()
        runner.run(step)
        written = parts[1].pages[:, :, :-1].abs().sum(dim=(0, 1, 3, 5)).nonzero()
        blocks = [(slot // BLOCK_SIZE, slot % BLOCK_SIZE) for slot in step.slots.tolist()]
        assert [tuple(place) for place in written.tolist()] == blocks
    assert len(replayed) == 2


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
    ("asked", "device", "ranks", "wanted"),
    [
        ("off", "cuda", 1, False),
        ("auto", "cpu", 1, False),
        ("auto", "cuda", 1, False),
        ("auto", "cuda", 2, False),
        ("on", "cpu", 1, True),
        ("on", "cuda", 1, True),
    ],
)
def test_steps_are_compiled_where_it_was_asked_for(asked, device, ranks, wanted):
    assert is_wanted(asked, device=torch.device(device), ranks=ranks) is wanted


def test_ranks_are_not_compiled():
    with pytest.raises(ConfigError, match=r"compile=on is for one process \(got 'tensor_parallel=2'\)"):
        is_wanted("on", device=torch.device("cpu"), ranks=2)


def test_a_compiler_that_fails_leaves_plain_code(caplog):
    def broken(_, __):
        raise RuntimeError("no such instruction")

    parts = engine_parts()
    compiled = compiled_steps(broken, parts)
    compiled.start()
    compiled.wait()
    assert not compiled.ready
    assert "compile=failed size=1" in caplog.text
    assert all(logits.isfinite().all() for logits in logits_of(*parts, compiled))
    compiled.close()
    compiled.close()
