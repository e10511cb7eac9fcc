"""Next-token loss."""

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor

from penstock.data.types import IGNORED_LABEL
from penstock.nn.cross_entropy import cross_entropy
from penstock.nn.head import Head


def next_token_loss(
    labels: Int[Tensor, "batch seq"], each_row: Callable[[Tensor], None] | None = None
) -> Callable[[Tensor, Head], Tensor]:
    """Return what turns a model's hidden states into the *sum* of cross entropies, in nats, float32.

    A sum, because the mean that matters is over the labels of all ranks and micro-batches.

    Args:
        each_row: receives the sum of each row [batch], float64, without a graph.
    """

    def finish(hidden: Float[Tensor, "batch seq hidden"], head: Head) -> Float[Tensor, ""]:
        total, each = cross_entropy(hidden.flatten(0, 1), head, labels.flatten(), ignored=IGNORED_LABEL)
        if each_row is not None:
            each_row(each.view_as(labels).double().sum(1))
        return total

    return finish
