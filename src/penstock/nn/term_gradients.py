"""Gradients of what an output head computes logits from, added up over chunks of tokens.

For losses whose autograd functions never have the logits of all tokens: a chunk's gradient by its logits
becomes gradients of the head's terms (nn/head.py) while it exists.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from penstock.devices import accelerator
from penstock.nn.head import Terms

NUM_TERMS = len(Terms._fields)


class TermGradients:
    """Gradients of the terms of an output head, for one backward pass.

    Args:
        wanted: whether each term needs its gradient.
        exact: dtype of sums over tokens.
    """

    def __init__(self, terms: Terms, wanted: Iterable[bool], *, exact: torch.dtype) -> None:
        self._terms = terms
        needs = Terms._make(wanted)
        self._hidden = torch.empty_like(terms.hidden) if needs.hidden else None
        self._weight = torch.zeros_like(terms.weight, dtype=exact) if needs.weight else None
        self._thin = self._b = self._factors = None
        if terms.thin is not None and terms.b is not None:
            self._thin = torch.empty_like(terms.thin) if needs.thin else None
            self._b = torch.zeros_like(terms.b, dtype=exact) if needs.b else None
        if terms.factors is not None:
            self._factors = torch.zeros_like(terms.factors, dtype=exact) if needs.factors else None

    def add(
        self, part: slice, slope: Float[Tensor, "part vocab"], products: Float[Tensor, "part vocab"]
    ) -> None:
        """Add the gradients of the next chunk.

        Args:
            slope: of the loss by `products` times the factors.
            products: as `Terms.products` returned them; read if there are factors.
        """
        hidden, weight, thin, b, factors = self._terms
        if factors is not None:
            if self._factors is not None:
                self._factors += (slope * products).sum(0)
            slope = slope * factors
        slope = slope.to(hidden.dtype)
        if self._hidden is not None:
            torch.mm(slope, weight, out=self._hidden[part])
        if self._weight is not None:
            _add_product(self._weight, slope.T, hidden[part])
        if thin is None or b is None:
            return
        if self._thin is not None:
            torch.mm(slope, b, out=self._thin[part])
        if self._b is not None:
            _add_product(self._b, slope.T, thin[part])

    def all(self) -> tuple[Tensor | None, ...]:
        """Return the gradient of each term, in the order of Terms; sums over tokens are in `exact`."""
        return self._hidden, self._weight, self._thin, self._b, self._factors


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a @ b` to a total that may have a wider dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif accelerator.kind_of(total.device).adds_to_float32:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
