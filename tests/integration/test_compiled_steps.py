"""Steps by compiled programs: the same numbers, and no request that waits for the compiler."""

import threading

import numpy as np
import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.engine.adapters import Adapters
from penstock.engine.batch import Batch
from penstock.engine.compiled import CompiledSteps, is_wanted
from penstock.engine.fuse import fuse
from penstock.engine.kv_cache import PagedCache
from penstock.engine.runner import Runner
from penstock.engine.weights import prepare
from penstock.models.llama.config import LlamaConfig
from penstock.models.llama.model import Llama
from penstock.nn import native
from penstock.nn.kernels import paged

BLOCK_SIZE, MAX_BLOCKS, MAX_SEQUENCES, MAX_TOKENS = 4, 8, 3, 20

pytestmark = pytest.mark.skipif(not native.is_available(), reason="compiled steps need the operators")


def engine_parts(weights="stored"):
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    model = Llama(config).eval()
    fuse(model)
    prepare(model, weights)
    cache = PagedCache(
        2,
        num_blocks=MAX_SEQUENCES * MAX_BLOCKS + 1,
        block_size=BLOCK_SIZE,
        kv_heads=1,
        head_dim=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
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


def decode(backend, weights="stored"):
    model, cache = engine_parts(weights)
    return CompiledSteps(
        model,
        cache,
        max_sequences=MAX_SEQUENCES,
        max_tokens=MAX_TOKENS,
        max_blocks=MAX_BLOCKS,
        backend=backend,
    ), (model, cache)


@pytest.mark.parametrize("weights", ["stored", "int8"])
def test_programs_compute_what_plain_code_does(weights):
    plain = logits_of(*engine_parts(weights))
    compiled, parts = decode("aot_eager", weights)
    compiled.start()
    compiled.wait()
    assert compiled.ready == {1, 2, 3, 4, 8, 16, 20}
    program, sizes = compiled._program, []
    compiled._program = lambda ids, *rest: sizes.append(ids.shape[1]) or program(ids, *rest)
    for ours, theirs in zip(logits_of(*parts, compiled), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert sizes == [16, 3, 2, 1, 3, 3, 1, 8, 20, 4]


def test_steps_are_plain_until_their_program_is_ready():
    began, go_on = threading.Event(), threading.Event()

    def slow(graph, _):
        began.set()
        assert go_on.wait(100)
        return graph.forward

    compiled, parts = decode(slow)
    compiled.start()
    assert began.wait(100)
    try:
        during = logits_of(*parts, compiled)
        assert not compiled.ready
    finally:
        go_on.set()
        compiled.close()
    for ours, theirs in zip(during, logits_of(*engine_parts()), strict=True):
        assert torch.equal(ours, theirs)


def test_a_network_that_was_changed_since_is_computed_plainly():
    compiled, parts = decode("aot_eager")
    compiled._is_plain = lambda: False
    compiled.start()
    compiled.wait()
    for ours, theirs in zip(logits_of(*parts, compiled), logits_of(*engine_parts()), strict=True):
        assert torch.equal(ours, theirs)


def test_attention_that_the_operator_does_not_compute_is_not_left_out(monkeypatch):
    plain = logits_of(*engine_parts())
    monkeypatch.setattr(paged, "MAX_GROUP", 0)
    compiled, parts = decode("aot_eager")
    compiled.start()
    compiled.wait()
    for ours, theirs in zip(logits_of(*parts, compiled), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


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

    compiled, parts = decode(broken)
    compiled.start()
    compiled.wait()
    assert not compiled.ready
    assert "compile=failed size=1" in caplog.text
    assert all(logits.isfinite().all() for logits in logits_of(*parts, compiled))
    compiled.close()
    compiled.close()
