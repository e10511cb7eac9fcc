"""Next-token loss, and the loss by corpus."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from penstock.data.types import IGNORED_LABEL
from penstock.nn.cross_entropy import cross_entropy
from penstock.nn.head import OutputHead
from penstock.train.state import DeviceBatch, TrainState


def next_token_loss(
    labels: Int[Tensor, "batch seq"], each_row: Callable[[Tensor], None] | None = None
) -> Callable[[Tensor, OutputHead], Tensor]:
    """Return a function from hidden states to the *sum* of cross entropies in nats, float32.

    A sum, because the relevant mean is over the labels of all ranks and micro-batches.

    Args:
        each_row: called with the sum of each row, [batch] float64, detached.
    """

    def finish(hidden: Float[Tensor, "batch seq hidden"], head: OutputHead) -> Float[Tensor, ""]:
        total, each = cross_entropy(hidden.flatten(0, 1), head, labels.flatten(), ignored=IGNORED_LABEL)
        if each_row is not None:
            each_row(each.view_as(labels).double().sum(1))
        return total

    return finish


class CorpusLosses:
    """Adds up losses by corpus, deterministically: float64 sums in the order of the rows.

    Args:
        corpora: number of corpora.
        of_rows: [rows] corpus index of each row of this rank's batch.
    """

    def __init__(self, corpora: int, of_rows: Tensor) -> None:
        self._one_of = functional.one_hot(of_rows, corpora).double()
        self._next = 0
        self.sums = torch.zeros(corpora, dtype=torch.float64, device=of_rows.device)

    def add(self, rows: Tensor) -> None:
        """Add the summed losses of the next rows, [n] float64."""
        past = self._next + len(rows)
        self.sums += rows @ self._one_of[self._next : past]  # no atomic add: its order would vary
        self._next = past

    def labels(self, counts: Tensor) -> Tensor:
        """Return the label count of each corpus, given that of each row [rows]."""
        return counts.double() @ self._one_of


def corpus_losses(state: TrainState, batch: DeviceBatch, device: torch.device) -> CorpusLosses | None:
    """Return the accumulator of losses by corpus; None: the mixture is not adaptive."""
    if state.adaptive is None:
        return None
    of_rows = state.loader.corpora_of(batch["sample_ids"].cpu().numpy())
    return CorpusLosses(len(state.loader.corpora), torch.from_numpy(of_rows).to(device))


def found_by_corpus(by_corpus: CorpusLosses | None, labels: Tensor) -> list[float]:
    """Return this rank's loss sums by corpus, then its label counts by corpus.

    Args:
        labels: [rows, seq] of this rank.
    """
    if by_corpus is None:
        return []
    counts = (labels != IGNORED_LABEL).sum(1).to(by_corpus.sums.device)
    return [*by_corpus.sums.tolist(), *by_corpus.labels(counts).tolist()]
