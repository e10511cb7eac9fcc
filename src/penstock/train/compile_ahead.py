"""Compilation before the first step: every program that micro-batches of a shape can need.

A compiled block has one program for rows that are one document each and another for packed documents
(nn/kernels/choose.py), each with gradients and, for validation, without. Which of them a micro-batch needs
depends on its documents, so a rare kind would be compiled in mid-run, on one rank while the others wait. Here
the first batch of each shape passes through all of them, with a loss of zero, and nothing is updated.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from penstock.core import clock
from penstock.core.log import EventLog
from penstock.parallel.config import CompileConfig
from penstock.parallel.mesh import World
from penstock.train.objective import DeviceBatch
from penstock.train.state import TrainState
from penstock.train.step import WHOLE_ROWS, check_batch, device_parts, loss_sum, passes

log = EventLog(__name__)

_SHORT = 32
"""Tokens of a short document: below the 64 from which on a document is worth a call (nn/kernels/sdpa.py)."""


def compile_ahead(
    state: TrainState,
    batch: DeviceBatch,
    world: World,
    config: CompileConfig,
    *,
    rows: int,
    mark: Callable[[str], None] = lambda _: None,
) -> None:
    """Compile all programs of a batch's shape, once per shape; every rank must call it.

    Weights, optimizer state and the loader stay as they are. Gradients are dropped.

    Args:
        rows: rows of a micro-batch.
        mark: called with "" at the end, so that this time counts to no phase of a step.

    Raises:
        CorpusError: the batch has a token id outside the model's vocabulary.
    """
    shape = (*batch["input_ids"].shape, rows)
    if not config.enabled or shape in state.compiled_shapes:
        return
    state.compiled_shapes.add(shape)
    began = clock.monotonic()
    check_batch(state, batch)
    parts = device_parts(state, batch, world, rows=rows)
    if state.pipeline is None:  # its schedule takes all micro-batches of a step; others differ in rows alone
        parts = [*{len(part["input_ids"]): part for part in parts}.values()]
    length = batch["input_ids"].shape[1]
    for same in _layouts(parts, length=length):
        sums = state.objective.begin_step(state, batch, world, rows=rows)
        finish = partial(state.objective.finish, sums=sums)
        passes(state, same, finish, scale=torch.zeros(()), mark=lambda _: None)
        state.optimizer.zero_grad()
        if state.heldout is not None:
            _without_gradients(state, same, batch, world, rows=rows)
    if world.is_first:
        seconds = clock.monotonic() - began
        log.info(
            "compiled",
            "Compiled the programs of a step of {rows} rows of {length:,} tokens, "
            "{micro_batch_rows} at a time, in {duration_s:.0f} s",
            rows=shape[0],
            length=shape[1],
            micro_batch_rows=shape[2],
            duration_s=seconds,
        )
    mark("")


def _without_gradients(
    state: TrainState, parts: Sequence[DeviceBatch], batch: DeviceBatch, world: World, *, rows: int
) -> None:
    sums = state.objective.begin_step(state, batch, world, rows=rows)
    was_training = state.model.training
    state.model.eval()
    with torch.no_grad():
        loss_sum(state.model, parts[0], state.objective.finish(parts[0], sums))
    state.model.train(was_training)


def _layouts(parts: Sequence[DeviceBatch], *, length: int) -> Iterator[list[DeviceBatch]]:
    """Yield the micro-batches with two documents a row, with short ones, and with whole rows.

    Micro-batches whose loss is one of sequences keep their own documents: a row of those has several.
    """
    if "segments" in parts[0]:
        yield [*parts]
        return
    for tokens in dict.fromkeys((-(-length // 2), min(_SHORT, length), length)):
        yield [_cut(part, tokens, length=length) for part in parts]


def _cut(part: DeviceBatch, tokens: int, *, length: int) -> DeviceBatch:
    """Return a micro-batch with documents of so many tokens; the last of a row may be shorter."""
    ends, rows = part["cu_seqlens"], len(part["input_ids"])
    in_row = torch.arange(0, length, tokens)
    starts = (torch.arange(rows)[:, None] * length + in_row).flatten()
    cut = torch.cat((starts, starts.new_tensor([rows * length]))).to(ends.device, ends.dtype)
    torch._dynamo.maybe_mark_dynamic(cut, 0)  # one program for any number of documents
    return {**part, "cu_seqlens": cut, WHOLE_ROWS: tokens == length}
