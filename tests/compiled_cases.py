"""Steps of a small engine, for plain code, for compiled programs and for graphs of either."""

import inspect
from dataclasses import replace

import numpy as np
import torch

from penstock.engine.model_runner.batch import StepBatch
from penstock.engine.model_runner.compiled_steps import CompiledSteps, program_sizes
from penstock.engine.model_runner.decode_graphs import DecodeGraphs
from penstock.engine.model_runner.drawn_tokens import DrawnTokens
from penstock.engine.model_runner.kv_cache import PagedCache
from penstock.engine.model_runner.lora import Adapters
from penstock.engine.model_runner.runner import Runner
from penstock.engine.model_runner.serving_layers import fuse, prepare
from penstock.models.decoder.model import Decoder
from tests.families import small_llama

NUM_LAYERS = 2
BLOCK_SIZE, MAX_BLOCKS, MAX_SEQUENCES, MAX_TOKENS = 4, 8, 3, 20


def engine_parts(weights="stored", *, device="cpu", groups=None, **changes):
    torch.manual_seed(5)
    config = small_llama(
        vocab_size=50,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_BLOCKS * BLOCK_SIZE,
        **changes,
    )
    model = Decoder(config).eval().to(device)
    fuse(model)
    prepare(model, weights)
    cache = PagedCache(
        NUM_LAYERS if groups is None else max(map(len, groups)),
        num_blocks=MAX_SEQUENCES * MAX_BLOCKS * (1 if groups is None else len(groups)) + 1,
        block_size=BLOCK_SIZE,
        kv_heads=1,
        head_dim=16,
        dtype=torch.float32,
        device=torch.device(device),
        groups=groups,
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
    return StepBatch(
        token_ids=(whole * 7 + 3) % 50,
        positions=whole,
        slots=np.concatenate(slots)[None],
        query_starts=ends,
        lengths=lengths,
        block_tables=tables[None, :, : -(-int(lengths.max()) // BLOCK_SIZE)],
        logit_rows=(ends[1:] - 1).astype(np.int64),
        adapters=np.full(len(sizes), -1, dtype=np.int32),
    )


STEPS = [step_of([5, 2, 7], [0, 0, 0])]
STEPS += [step_of([1] * count, [5 + i, 2 + i, 7 + i][:count]) for i, count in enumerate([3, 2, 1, 3, 3, 1])]
STEPS += [step_of([1, 6], [9, 3]), step_of([20], [0]), step_of([1, 1, 2], [20, 9, 12])]
"""Prompts, answers in the making, and both; a program has tokens to spare, or shares, or neither."""


def in_two_groups(step):
    """The same step, in which the layers of a second cache group have blocks of their own."""
    more = MAX_SEQUENCES * MAX_BLOCKS
    return replace(
        step,
        slots=np.concatenate([step.slots, step.slots + more * BLOCK_SIZE]),
        block_tables=np.concatenate([step.block_tables, step.block_tables + np.int32(more)]),
    )


def runner_of(model, cache, forward=None):
    return Runner(model, cache, Adapters(model, model.config), forward=forward)


def logits_of(model, cache, forward=None, *, graphs=None, steps=STEPS):
    runner = runner_of(model, cache, forward)
    runner._graphs = graphs
    return [runner.run(step).logits.clone() for step in steps]


def compiled_steps(backend, parts, *, sizes=None, has_any=False):
    sizes = sizes or program_sizes(max_sequences=MAX_SEQUENCES, max_tokens=MAX_TOKENS)
    return CompiledSteps(*parts, sizes=sizes, has_any=has_any, backend=backend)


class Recorder:
    """Graphs that compute again what they have recorded, from the same tensors."""

    def __init__(self):
        self.recorded, self.replayed = [], []
        """Numbers of tokens of all graphs, and of all replays."""

    def __call__(self, compute):
        compute()
        size = inspect.getclosurevars(compute).nonlocals["size"]
        self.recorded.append(size)

        def replay():
            compute()
            self.replayed.append(size)

        return replay


def graphs_of(model, cache, forward=None, *, record, sizes=(1, 2, MAX_SEQUENCES)):
    """Recorded graphs of the plain network, or of compiled steps."""
    forward = forward or runner_of(model, cache)._plain
    drawn = DrawnTokens(max(sizes), cache.device)
    graphs = DecodeGraphs(
        forward, model.logits, cache, drawn, sizes=sizes, max_blocks=MAX_BLOCKS, record=record
    )
    graphs.record_all()
    return graphs
