"""Activation checkpointing: recompute a block's activations in its backward pass (arXiv:1604.06174).

A block's `forward` is replaced, not the block: names, hooks and sharding around it stay. Blocks draw no
random numbers (masks of dropout are functions), so no generator state is saved, and recomputed activations
are bit-identical.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from penstock.parallel.activation_checkpointing_plan import Mode

Forward = Callable[..., Any]  # Any: arguments of a block

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
    "penstock.attend_capped.default",
    "torch_attn._varlen_attn.default",
)
"""Matrix products and attention, which take nearly all time; by name, as torch builds and devices differ."""


def recompute(model: nn.Module, modes: Sequence[Mode]) -> None:
    """Apply its activation checkpointing mode to each block, in place.

    Args:
        model: its blocks are `model.layers`.
    """
    for block, mode in zip(cast(nn.ModuleList, model.layers), modes, strict=True):
        if mode == "full":
            block.forward = again(block.forward)
        elif mode == "operators":
            block.forward = again(block.forward, context_fn=_keeping_operators)


def again(forward: Forward, **options: Any) -> Forward:
    """Return a forward that saves its arguments and calls `forward` again in the backward pass."""
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, **options)


def _keeping_operators() -> Any:
    kept = [found for name in _KEPT_OPERATORS if (found := _operator(name)) is not None]
    return create_selective_checkpoint_contexts(kept)  # type: ignore[no-untyped-call]


def _operator(name: str) -> Any:
    library, operator, overload = name.split(".")
    packet = getattr(getattr(torch.ops, library), operator, None)
    return getattr(packet, overload, None)
