"""Compute a block's activations again in its backward pass (Chen et al., arXiv:1604.06174).

A block's `forward` is replaced, not the block: names, hooks and the sharding around it stay as they are.
Nothing in a block draws random numbers, so no generator is saved, and what is computed again is the same
to the bit.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from penstock.parallel.recompute_plan import Mode

Forward = Callable[..., Any]  # Any: a block's

_KEPT_OPERATORS = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten._scaled_mm.default",
    "aten._scaled_mm_v2.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "penstock.attend_documents.default",
    "torch_attn._varlen_attn.default",
)
"""Products and attention, where nearly all time goes, by name: a torch or a device has not all of them."""


def recompute(model: nn.Module, modes: Sequence[Mode]) -> None:
    """Let each block of a model do as its mode says, in place.

    Args:
        model: `model.layers` are the blocks.
    """
    for block, mode in zip(cast(nn.ModuleList, model.layers), modes, strict=True):
        if mode == "full":
            block.forward = again(block.forward)
        elif mode == "operators":
            block.forward = again(block.forward, context_fn=_keeping_operators)


def again(forward: Forward, **options: Any) -> Forward:
    """Return a forward that keeps its arguments and calls `forward` a second time in the backward pass."""
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, **options)


def _keeping_operators() -> Any:
    kept = [found for name in _KEPT_OPERATORS if (found := _operator(name)) is not None]
    return create_selective_checkpoint_contexts(kept)  # type: ignore[no-untyped-call]


def _operator(name: str) -> Any:
    library, operator, overload = name.split(".")
    packet = getattr(getattr(torch.ops, library), operator, None)
    return getattr(packet, overload, None)
