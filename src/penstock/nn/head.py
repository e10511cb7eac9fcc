"""Output head: the output matrix, its adapter, its scale, and its rows on this rank; read by the losses.

    logits = factors * (W h + B thin) / logits_scaling        thin = scale * A h

Without an adapter W h / logits_scaling. The factors are DoRA's (nn/linear/lora.py). With a softcap the logits
are capped (nn/softcap.py).
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from penstock.nn.linear.lora import Adapter, factors
from penstock.nn.softcap import capped, capped_slope


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


class Terms(NamedTuple):
    """Tensors from which the logits of some tokens are computed; each may have a graph."""

    hidden: Float[Tensor, "*tokens hidden"]
    weight: Float[Tensor, "vocab hidden"]
    thin: Float[Tensor, "*tokens rank"] | None = None
    b: Float[Tensor, "vocab rank"] | None = None
    factors: Float[Tensor, "vocab"] | None = None

    def products(self, part: slice = slice(None)) -> Float[Tensor, "*part vocab"]:
        """Return the sum of the products with W and B for a part of the tokens, without the factors."""
        out: Tensor = linear(self.hidden[part], self.weight)
        return out if self.thin is None or self.b is None else out.add_(linear(self.thin[part], self.b))


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
    adapter: Adapter | None = None
    """Of the output matrix: rows of B, and magnitudes, as `weight` has them."""
    softcap: float | None = None
    """Cap on the logits; None: there is none."""

    def __call__(self, hidden: Float[Tensor, "... hidden"]) -> Float[Tensor, "... vocab"]:
        """Return the logits of the rows on this rank, in the dtype of the weights."""
        terms = self.terms(hidden)
        return self.logits(terms.products(), terms)

    def terms(self, hidden: Float[Tensor, "*tokens hidden"]) -> Terms:
        """Return what the logits of tokens are computed from."""
        adapter = self.adapter
        if adapter is None:
            return Terms(hidden, self.weight)
        scales = None
        if adapter.magnitude is not None:
            scales = factors(adapter.magnitude, adapter.squared_lengths(self.weight))
        return Terms(hidden, self.weight, adapter.thin(hidden), adapter.b, scales)

    def logits(self, products: Float[Tensor, "... vocab"], terms: Terms) -> Float[Tensor, "... vocab"]:
        """Return the logits, given the products of `terms`."""
        logits = products if terms.factors is None else products * terms.factors
        scaled = logits if self.logits_scaling == 1.0 else logits / self.logits_scaling
        return capped(scaled, self.softcap)

    def slope(self, logits: Float[Tensor, "... vocab"]) -> Float[Tensor, "... vocab"] | None:
        """Return the derivative of logits by what is capped; None: there is no softcap."""
        return None if self.softcap is None else capped_slope(logits, self.softcap)
