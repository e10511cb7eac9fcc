"""One optimizer step: forward and backward over micro-batches, clip, update.

The loss is the mean over the labels of *all* ranks and micro-batches: each sum is divided by the
global count before its backward, so the gradient does not depend on how rows are spread. FSDP
averages gradients over the data-parallel ranks, hence the factor `num_averaged`. Where copies of the model
are islands it averages within an island only, so that an island's gradient is that of its own rows, times the
number of islands: their mean is the global gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.core.errors import CorpusError
from penstock.data.types import IGNORED_LABEL
from penstock.parallel.clip import clip_gradients
from penstock.parallel.mesh import World
from penstock.train.corpus_losses import CorpusLosses, corpus_losses, found_by_corpus
from penstock.train.loss import next_token_loss
from penstock.train.outer import norm_of_islands
from penstock.train.state import Batch, TrainState


class Asked(NamedTuple):
    """What a rank was asked in the meantime."""

    stop: bool
    """To stop."""
    news: bool = False
    """To look at a request to the run."""


ALL = slice(None)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step found, equal on all ranks."""

    loss: float
    """Mean over all labels, nats."""
    grad_norm: float
    """Before clipping; of islands, each of which clips its own, the root mean square."""
    stop: bool
    """Whether any rank was asked to stop."""
    news: bool = False
    """Whether there is a request to take up."""
    corpus_sums: tuple[float, ...] = ()
    """Summed loss of the rows of each corpus, nats; empty where nobody asked."""
    corpus_labels: tuple[float, ...] = ()
    """Over how many labels."""
    skipped: str = ""
    """Why the weights were not changed; empty where they were."""


def micro_batches(batch: Batch, *, rows: int, device: torch.device, stretch: slice = ALL) -> Iterator[Batch]:
    """Split a batch into runs of `rows` rows on a device; `cu_seqlens` is cut at their edges.

    Args:
        stretch: of each row that is wanted; `cu_seqlens` stays that of whole rows.
    """
    total, length = batch["input_ids"].shape
    for first in range(0, total, rows):
        past = min(first + rows, total)
        ends = batch["cu_seqlens"]
        inside = ends[(ends >= first * length) & (ends <= past * length)] - first * length
        part = {name: batch[name][first:past, stretch] for name in ("input_ids", "labels", "position_ids")}
        yield {name: t.to(device, non_blocking=True) for name, t in {**part, "cu_seqlens": inside}.items()}


def loss_sum(model: torch.nn.Module, part: Batch, by_corpus: CorpusLosses | None = None) -> Tensor:
    """Return the summed loss of a micro-batch, a float32 scalar with a graph."""
    inputs = inputs_of(part, by_corpus)
    loss: Tensor = model(inputs.pop("input_ids"), **inputs)
    return loss


def inputs_of(part: Batch, by_corpus: CorpusLosses | None, *, scale: float = 1.0) -> Batch:
    """Return what the model's forward takes for a micro-batch, so that it gives `scale` x the summed loss."""
    finish = next_token_loss(part["labels"], None if by_corpus is None else by_corpus.add)
    inputs = {name: part[name] for name in ("input_ids", "position_ids", "cu_seqlens")}
    return {**inputs, "finish": lambda hidden, head: finish(hidden, head) * scale}


def passes(
    state: TrainState,
    parts: Sequence[Batch],
    by_corpus: CorpusLosses | None,
    *,
    scale: float,
    mark: Callable[[str], None],
) -> Tensor:
    """Run the forward and backward passes of all micro-batches; return `scale` x their summed loss."""
    if state.pipeline is not None:
        with state.ethernet.step(1):  # the pipeline itself gathers once and reduces once
            total = state.pipeline.step([inputs_of(part, by_corpus, scale=scale) for part in parts])
        state.pipeline.sum_tied()
        mark("backward")
        return total
    losses = []
    with state.ethernet.step(len(parts)):
        for part in parts:
            state.ethernet.next_micro_batch()
            loss = loss_sum(state.model, part, by_corpus) * scale
            mark("forward")
            loss.backward()  # type: ignore[no-untyped-call]
            mark("backward")
            losses.append(loss.detach())
    mark("backward")
    return torch.stack(losses).sum()


def train_step(
    state: TrainState,
    batch: Batch,
    world: World,
    *,
    micro_batch_size: int,
    clip_norm: float,
    asked: Asked,
    mark: Callable[[str], None] = lambda _: None,
) -> StepResult:
    """Take one step with this rank's share of the batch; every rank must call it.

    Args:
        micro_batch_size: rows per forward pass.
        asked: of this rank; the ranks agree on it here, so all stop after the same step.
        mark: told each phase as it ends; see obs/phases.py.

    Raises:
        CorpusError: the batch holds a token beyond the model's vocabulary.
        Rewind: too many steps could not be taken; nothing was updated.
    """
    check_vocabulary(batch, state.model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    copies, num_averaged = state.mesh.copies, state.mesh.num_averaged
    stretch = state.mesh.stretch(batch["labels"].shape[1])
    counted = batch["labels"][:, stretch if state.mesh.has_loss else slice(0)]
    labels = int((counted != IGNORED_LABEL).sum())
    global_labels, stops, told = world.sum(labels, *asked)
    mark("communication")
    by_corpus = corpus_losses(state, batch, world.device)
    scale = num_averaged / max(global_labels / copies, 1.0)
    parts = [*micro_batches(batch, rows=micro_batch_size, device=world.device, stretch=stretch)]
    local_loss = passes(state, parts, by_corpus, scale=scale, mark=mark)
    tied = None if state.pipeline is None else state.pipeline.tied
    grad_norm = clip_gradients(state.model.parameters(), clip_norm, state.mesh.island, twice=tied)
    if state.mesh.has_islands:
        grad_norm = norm_of_islands(grad_norm, world)
    mark("optimizer")
    each = found_by_corpus(by_corpus, counted)
    summed, *each = (value / copies for value in world.sum(local_loss.item(), *each))
    mark("communication")
    mean_loss = summed / num_averaged
    skipped = state.guard.judge(mean_loss, grad_norm, step=state.step)
    if not skipped:
        state.optimizer.step()
    state.optimizer.zero_grad()
    mark("optimizer")
    middle = len(each) // 2
    sums, counts = tuple(each[:middle]), tuple(each[middle:])
    return StepResult(mean_loss, grad_norm, stops > 0, told > 0, sums, counts, skipped)


def check_vocabulary(batch: Batch, vocab_size: int) -> None:
    """Refuse token ids that the embedding has no row for.

    Raises:
        CorpusError: with the id.
    """
    largest = int(batch["input_ids"].max())
    if largest >= vocab_size:
        raise CorpusError(
            f"A batch holds token id {largest}, beyond the model's vocabulary of {vocab_size}",
            fix="Find the shard with `penstock data verify`, or raise model.vocab_size.",
        )
