"""The output matrix as a loss or a generator sees it: a weight, a scale, and who holds which rows of it."""

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
    """All rows are here."""

    first: int = 0

    def largest(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x


@dataclass(frozen=True, slots=True)
class Head:
    """From hidden states to logits, for one forward pass; holds no parameter of its own."""

    weight: Float[Tensor, "vocab hidden"]
    """Of a linear layer, or the embedding again; under `fully_shard` whole only inside the forward pass."""
    logits_scaling: float = 1.0
    """The logits are divided by it."""
    vocabulary: Vocabulary = Whole()
    """Which token ids the rows of `weight` are."""

    def __call__(self, hidden: Float[Tensor, "... hidden"]) -> Float[Tensor, "... vocab"]:
        """Return the logits of the rows here, in the dtype of the weights."""
        logits: Tensor = linear(hidden, self.weight)
        return logits if self.logits_scaling == 1.0 else logits / self.logits_scaling
