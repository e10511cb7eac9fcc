"""Next-token loss, and the loss by corpus."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from penstock.data.types import IGNORED_LABEL
from penstock.nn.cross_entropy import cross_entropy
from penstock.nn.head import OutputHead
from penstock.train.objective import Finish


def next_token_loss(
    labels: Int[Tensor, "batch seq"], each_row: Callable[[Tensor], None] | None = None
) -> Finish:
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
