"""Next-token loss."""

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from penstock.data.types import IGNORED_LABEL


def next_token_loss(
    labels: Int[Tensor, "batch seq"], each_row: Callable[[Tensor], None] | None = None
) -> Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]:
    """Return what turns a model's hidden states into the *sum* of cross entropies, in nats, float32.

    A sum, because the mean that matters is over the labels of all ranks and micro-batches.

    Args:
        each_row: receives the sum of each row [batch], float64, without a graph.
    """

    def finish(
        hidden: Float[Tensor, "batch seq hidden"], project: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, ""]:
        logits = project(hidden).float().flatten(0, 1)
        if each_row is None:
            return functional.cross_entropy(
                logits, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
            )
        each = functional.cross_entropy(
            logits, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
        )
        each_row(each.detach().view_as(labels).double().sum(1))
        return each.sum()

    return finish
