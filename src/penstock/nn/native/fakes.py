"""The shapes that each C++ operator returns, which is what `torch.compile` needs to know of them."""

from collections.abc import Callable

import torch
from torch import Tensor


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x)


def _add_rms_norm(x: Tensor, delta: Tensor, scale: float, weight: Tensor, eps: float) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x)


def _paged_attention(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


FAKES: dict[str, Callable[..., Tensor]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "paged_attention": _paged_attention,
}
"""Operator -> a function of its arguments that makes an empty result."""
