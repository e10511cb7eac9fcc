"""Softcaps of Gemma 2 (arXiv:2408.00118): scores and logits are kept within (-cap, cap) by a tanh."""

import torch
from torch import Tensor


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Return `cap * tanh(x / cap)` in the dtype of `x`; None: `x` itself.

    >>> capped(torch.tensor([0.0, 1e9]), 30.0).tolist()
    [0.0, 30.0]
    """
    return x if cap is None else torch.tanh(x / cap) * cap


def capped_slope(y: Tensor, cap: float) -> Tensor:
    """Return the derivative of `capped`, given its result `y`.

    >>> capped_slope(torch.tensor([0.0, 30.0]), 30.0).tolist()
    [1.0, 0.0]
    """
    return (y / cap).square_().neg_().add_(1)
