"""C++ operators for CPUs, `torch.ops.penstock.*`: built once per machine. Until then, and without a compiler,
plain torch runs.

A caller keeps a plain PyTorch reference beside each operator and checks `is_available()` first. To add an
operator: a `.cpp` file here that registers itself, its result shape in `FAKES`, an equality test.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from penstock.core.log import EventLog
from penstock.core.native_build import BeingBuilt, NotBuilt
from penstock.nn.native.build import built_library

log = EventLog(__name__)


@cache
def is_available() -> bool:
    """Load the operators; if they are not built yet, a process of its own builds them for the next start.

    The answer is that of this process's first call: a process never changes its kernels. If it is no, a
    warning says why.
    """
    try:
        torch.ops.load_library(str(built_library()))  # type: ignore[no-untyped-call]
    except BeingBuilt as error:
        log.warning(
            "operators_building",
            "{reason:sentence}. Until then plain PyTorch computes, slower; the next start has the operators",
            reason=str(error).removesuffix("."),
        )
        return False
    except (NotBuilt, OSError) as error:  # OSError: the dynamic loader
        log.warning(
            "operators_missing",
            "The C++ operators are not used, plain PyTorch computes instead, slower: {reason}",
            reason=error,
        )
        return False
    for name, fake in FAKES.items():
        torch.library.register_fake(f"penstock::{name}", fake)
    return True


def _rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x)


def _add_rms_norm(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


def _paged_attention(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


def _rotate_and_store(qkv: Tensor, *rest: Tensor) -> Tensor:
    cosines, _, _, keys, *_ = rest  # cosines, sines, slots, keys, values, norms
    kv_heads, head_dim = keys.shape[1], cosines.shape[-1]  # pages of 8 bits are wider
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads, head_dim)


def _activate(gate_up: Tensor, activation: int, is_gated: bool) -> Tensor:  # noqa: ARG001
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // (2 if is_gated else 1))


def _linear(x: Tensor, *matrix_and_outputs: Tensor | int | None) -> Tensor:
    outputs = matrix_and_outputs[-1]
    assert isinstance(outputs, int), outputs
    return x.new_empty(*x.shape[:-1], outputs)


def _decoder_block(*_: object) -> None:
    pass


def _draw(logits: Tensor, settings: Tensor | None) -> Tensor:  # noqa: ARG001
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


FAKES: dict[str, Callable[..., Tensor | None]] = {
    "linear": _linear,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "paged_attention": _paged_attention,
    "decoder_block": _decoder_block,
    "rotate_and_store": _rotate_and_store,
    "activate": _activate,
    "draw": _draw,
}
"""Operator -> function that returns an empty result of the right shape, for `torch.compile`."""
