"""Output head: the output matrix, its scale, and its rows on this rank; read by the loss and the sampler."""

from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear


class Vocabulary(Protocol):
    """The rows of the output matrix that this rank holds, and reductions over the ranks that share it."""

    @property
    def first(self) -> int:
        """Token id of the first row here."""
        ...

    def largest(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks; no graph."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """Return the elementwise sum over the ranks; no graph."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """Vocabulary of a rank that holds all rows."""

    first: int = 0

    def largest(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x


@dataclass(frozen=True, slots=True)
class OutputHead:
    """Function from hidden states to logits for one forward pass; owns no parameter."""

    weight: Float[Tensor, "vocab hidden"]
    """Output matrix: of a linear layer or the embedding. Under `fully_shard` whole only in the forward
    pass."""
    logits_scaling: float = 1.0
    """Divisor of the logits."""
    vocabulary: Vocabulary = Whole()
    """Token ids of the rows of `weight`."""

    def __call__(self, hidden: Float[Tensor, "... hidden"]) -> Float[Tensor, "... vocab"]:
        """Return the logits of the rows on this rank, in the dtype of the weights."""
        logits: Tensor = linear(hidden, self.weight)
        return logits if self.logits_scaling == 1.0 else logits / self.logits_scaling
