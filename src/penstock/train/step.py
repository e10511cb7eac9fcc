"""One optimizer step: forward and backward over micro-batches, clipping, update.

The loss is the mean over the labels (or the pairs; see objective.py) of *all* ranks and micro-batches: each
sum is divided by the global count before its backward pass, so the gradient does not depend on the
distribution of rows. FSDP averages gradients over the data-parallel ranks, hence the factor `num_averaged`.
With islands it averages within an island only, so that an island's gradient is that of its own rows times the
number of islands: their mean is the global gradient.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.core.errors import CorpusError
from penstock.data.explain import DocumentSpan
from penstock.nn.linear.dropout import token_keys
from penstock.parallel.clip import divisor, squared_norm
from penstock.parallel.mesh import World
from penstock.train.objective import DeviceBatch, Finish
from penstock.train.state import TrainState


class ControlFlags(NamedTuple):
    """Requests to one rank since the last step."""

    stop: bool
    """True if the rank was asked to stop."""
    news: bool = False
    """True if there are control requests to the run."""


ALL = slice(None)
_BY_ROW = ("input_ids", "labels", "position_ids")
_MODEL_INPUTS = ("input_ids", "position_ids")
TOKEN_KEYS = "token_keys"
"""Field of a micro-batch: keys of its tokens in this step, for dropout; and the argument of a model's
forward."""
WHOLE_ROWS = "has_whole_rows"
"""Field of a micro-batch: True if each row is one document, without padding, so that no attention kernel for
packed documents is needed."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step, equal on all ranks."""

    loss: float
    """Mean loss over all labels, in nats; or over what else the run's objective counts."""
    grad_norm: float
    """Gradient norm before clipping; with islands, which clip separately, the root mean square."""
    stop: bool
    """True if any rank was asked to stop."""
    news: bool = False
    """True if there are control requests to apply."""
    sums: tuple[float, ...] = ()
    """The objective's sums over all ranks."""
    metrics: dict[str, Any] = field(default_factory=dict)  # Any: JSON values
    """The objective's metrics."""
    count: float = 0.0
    """Number of terms that the loss is a mean of: labels, or pairs."""
    skipped: str = ""
    """Reason for skipping the step; "": it was taken."""

    @property
    def corpus_sums(self) -> tuple[float, ...]:
        """Summed loss of each corpus in nats; empty unless the mixture is adaptive."""
        return self.sums[: len(self.sums) // 2]

    @property
    def corpus_labels(self) -> tuple[float, ...]:
        """Number of labels of each corpus."""
        return self.sums[len(self.sums) // 2 :]


def micro_batches(
    batch: DeviceBatch,
    *,
    rows: int,
    device: torch.device,
    sequence_slice: slice = ALL,
    fields: Sequence[str] = (),
    prepare: Callable[[DeviceBatch], DeviceBatch] = lambda part: part,
) -> Iterator[DeviceBatch]:
    """Split a batch into micro-batches of `rows` rows on a device; `cu_seqlens` is cut accordingly.

    Whether each row is one document is decided here, on the host, where the ends of the documents are known.

    Args:
        sequence_slice: slice of each row for this rank; `cu_seqlens` stays that of whole rows.
        fields: fields to take besides those of every step.
        prepare: applied to each micro-batch of whole rows; fields of one dimension are not sliced.
    """
    total, length = batch["input_ids"].shape
    for first in range(0, total, rows):
        past = min(first + rows, total)
        ends = batch["cu_seqlens"]
        inside = ends[(ends >= first * length) & (ends <= past * length)] - first * length
        whole = {name: batch[name][first:past] for name in (*_BY_ROW, *fields)}
        part = prepare({**whole, "cu_seqlens": inside})
        on_device = {
            name: (t if t.ndim == 1 else t[:, sequence_slice]).to(device, non_blocking=True)
            for name, t in part.items()
        }
        yield {**on_device, WHOLE_ROWS: len(part["cu_seqlens"]) == past - first + 1}


def device_parts(state: TrainState, batch: DeviceBatch, world: World, *, rows: int) -> list[DeviceBatch]:
    """Return this rank's micro-batches of a batch, on its device, with the fields of the run's objective."""
    objective, fields = state.objective, state.objective.fields
    if state.dropout_seed is not None:
        length = batch["labels"].shape[1]
        keys = token_keys(batch["sample_ids"].cpu(), length, seed=state.dropout_seed, step=state.step)
        batch, fields = {**batch, TOKEN_KEYS: keys}, (*fields, TOKEN_KEYS)
    return [
        *micro_batches(
            batch,
            rows=rows,
            device=world.device,
            sequence_slice=state.mesh.sequence_slice(batch["labels"].shape[1]),
            fields=fields,
            prepare=objective.prepare,
        )
    ]


def joined(parts: Sequence[DeviceBatch]) -> DeviceBatch:
    """Join micro-batches into one that blocks process one after the other; see `Llama.forward`."""
    batch: DeviceBatch = {name: tuple(part[name] for part in parts) for name in parts[0]}
    return {**batch, "labels": torch.cat(batch["labels"])}


def loss_sum(model: torch.nn.Module, part: DeviceBatch, finish: Finish) -> Tensor:
    """Return the summed loss of a micro-batch, a float32 scalar with a graph."""
    inputs = inputs_of(part, finish)
    loss: Tensor = model(inputs.pop("input_ids"), **inputs)
    return loss


def inputs_of(part: DeviceBatch, finish: Finish, *, scale: float | Tensor = 1.0) -> DeviceBatch:
    """Return the arguments of the model's forward for a micro-batch, which returns `scale` x `finish`."""
    inputs = {name: part[name] for name in (*_MODEL_INPUTS, TOKEN_KEYS) if name in part}
    return {
        **inputs,
        "cu_seqlens": _ends_in_rows(part),
        "finish": lambda hidden, head: finish(hidden, head) * scale,
    }


def _ends_in_rows(part: DeviceBatch) -> Any:  # Any: a tensor or None, or a tuple of them
    """Return the ends of documents for the model's forward: None where every row is one document."""
    ends, whole = part["cu_seqlens"], part[WHOLE_ROWS]
    if isinstance(ends, tuple):
        return tuple(None if is_whole else end for end, is_whole in zip(ends, whole, strict=True))
    return None if whole else ends


def passes(
    state: TrainState,
    parts: Sequence[DeviceBatch],
    finish_of: Callable[[DeviceBatch], Finish],
    *,
    scale: Tensor,
    mark: Callable[[str], None],
) -> Tensor:
    """Run the forward and backward passes of all micro-batches; return `scale` x their summed loss.

    Args:
        scale: a float32 scalar, on the host or on the device.
    """
    if state.pipeline is not None:
        with state.ethernet.step(1):  # the pipeline itself gathers once and reduces once
            total = state.pipeline.step([inputs_of(part, finish_of(part), scale=scale) for part in parts])
        state.pipeline.sum_tied()
        mark("backward")
        return total
    losses = []
    if state.ethernet.is_breadth_first and len(parts) > 1:
        parts = [joined(parts)]
    with state.ethernet.step(len(parts)):
        for part in parts:
            state.ethernet.next_micro_batch()
            loss = loss_sum(state.model, part, finish_of(part)) * scale
            mark("forward")
            loss.backward()  # type: ignore[no-untyped-call]
            mark("backward")
            losses.append(loss.detach())
    mark("backward")
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def train_step(
    state: TrainState,
    batch: DeviceBatch,
    world: World,
    *,
    micro_batch_size: int,
    clip_norm: float,
    asked: ControlFlags,
    mark: Callable[[str], None] = lambda _: None,
) -> StepResult:
    """Take one step with this rank's share of the batch; every rank must call it.

    Args:
        micro_batch_size: rows per forward pass.
        asked: requests to this rank; the ranks agree on them here, so all stop after the same step.
        mark: called with each phase as it ends; see obs/meter.py.

    Raises:
        CorpusError: the batch has a token id outside the model's vocabulary.
        Rewind: too many steps were skipped; nothing was updated.
    """
    check_batch(state, batch)
    copies, num_averaged = state.mesh.copies, state.mesh.num_averaged
    sequence_slice = state.mesh.sequence_slice(batch["labels"].shape[1])
    objective = state.objective
    count = objective.count(batch, sequence_slice if state.mesh.has_loss else slice(0))
    asked_for = world.add_up(torch.tensor([count, *asked], dtype=torch.float64))
    mark("communication")
    sums = objective.begin_step(state, batch, world, rows=micro_batch_size)
    scale = (num_averaged / (asked_for[0] / copies).clamp(min=1.0)).float()
    parts = device_parts(state, batch, world, rows=micro_batch_size)
    local_loss = passes(state, parts, partial(objective.finish, sums=sums), scale=scale, mark=mark)
    tied = None if state.pipeline is None else state.pipeline.tied
    of_island = state.mesh.island.add_up(squared_norm(state.model.parameters(), world.device, twice=tied))
    of_all = world.add_up(of_island) / world.ranks.world_size if state.mesh.has_islands else of_island
    totals = world.add_up(_one_vector([local_loss.double()[None], *sums.values()]))
    (own_square,), (square,), (summed, *others), (global_count, stops, told) = read(
        of_island, of_all, totals, asked_for
    )
    mark("communication")
    mean_loss, grad_norm = summed / copies / num_averaged, math.sqrt(square)
    each = [value / copies for value in others]
    skipped = state.guard.judge(mean_loss, grad_norm, step=state.step)
    if not skipped:
        state.optimizer.step(divisor=divisor(math.sqrt(own_square), clip_norm))
    state.optimizer.zero_grad()
    mark("optimizer")
    return StepResult(
        mean_loss,
        grad_norm,
        stops > 0,
        told > 0,
        tuple(each),
        objective.metrics(each),
        count=global_count / copies,
        skipped=skipped,
    )


def read(*vectors: Tensor) -> list[list[float]]:
    """Return the values of float64 vectors; those on one device are copied together, with one wait."""
    found: list[list[float]] = [[] for _ in vectors]
    for device in {vector.device for vector in vectors}:
        here = [index for index, vector in enumerate(vectors) if vector.device == device]
        values = iter(_one_vector([vectors[index] for index in here]).tolist())
        for index in here:
            found[index] = list(islice(values, len(vectors[index])))
    return found


def _one_vector(vectors: Sequence[Tensor]) -> Tensor:
    return vectors[0] if len(vectors) == 1 else torch.cat(list(vectors))


def check_vocabulary(
    batch: DeviceBatch, vocab_size: int, *, spans_of: Callable[[int], Sequence[DocumentSpan]] = lambda _: ()
) -> None:
    """Raise for token ids outside the model's vocabulary, in a batch's inputs or labels.

    Args:
        spans_of: returns the documents of a row, to name the one with the id.

    Raises:
        CorpusError: with the id, and where it is.
    """
    worst = max(("input_ids", "labels"), key=lambda name: int(batch[name].max()))
    largest = int(batch[worst].max())
    if largest >= vocab_size:
        row, column = (batch[worst] >= vocab_size).nonzero()[0].tolist()
        raise CorpusError(
            f"A batch holds token id {largest}, beyond the model's vocabulary of {vocab_size}"
            f"{_place(spans_of(row), column)}",
            fix="Find the shard with `penstock data verify`, or raise model.vocab_size.",
        )


def _place(spans: Sequence[DocumentSpan], column: int) -> str:
    """Return the words for the document at a column of a row."""
    past = 0
    for span in spans:
        past += span.tokens
        if column < past:
            return f", in document {span.document} of corpus {span.corpus!r} ({span.shard})"
    return ""


def check_batch(state: TrainState, batch: DeviceBatch) -> None:
    """Raise as `check_vocabulary` does for a batch of a run's loader."""

    def spans_of(row: int) -> Sequence[DocumentSpan]:
        return state.loader.explain(batch["sample_ids"][row : row + 1].cpu().numpy())[0]

    check_vocabulary(batch, state.model.config.vocab_size, spans_of=spans_of)  # type: ignore[union-attr, arg-type]
