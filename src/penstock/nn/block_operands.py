"""What the C++ operator of a whole block computes with, taken from a block's modules as they are now.

What adapters add, sums over ranks and matrices that the operators do not know stand in a block as modules of
other types: such a block has no operands, and its modules compute one by one. Whole steps, which add and sum
by themselves (engine/whole_steps.py), ask for those of the layers inside.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.nn.fused import FusedAttention, FusedRMSNorm, FusedSwiGLU
from penstock.nn.kernels.paged import MAX_GROUP, LayerPages, Paged
from penstock.nn.packed import PackedLinear
from penstock.nn.quantized import Int4Linear, Int8Linear

KINDS = (PackedLinear, Int8Linear, Int4Linear)
"""The layers whose matrices the operator multiplies by."""

Operands = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Of a linear layer: panels, scales, offsets, bias."""


@dataclass(frozen=True, slots=True)
class BlockOperands:
    """Everything of one block that stays the same from step to step."""

    linears: list[Tensor | None]
    outputs: list[int]
    norms: list[Tensor | None]
    eps: float
    scale: float

    def compute(
        self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Paged, pages: LayerPages, *, multiplier: float
    ) -> Tensor:
        """Apply the block to [1, t, c], in place."""
        step = pages.step
        torch.ops.penstock.decoder_block(
            x[0], *rope, step.slots, step.query_starts, step.lengths, step.block_tables,
            pages.keys, pages.values,
            self.linears, self.outputs, self.norms, self.eps, self.scale, multiplier, attend.window or 0,
        )  # fmt: skip
        return x


def linears_of(attention: FusedAttention, mlp: FusedSwiGLU) -> tuple[nn.Module | None, ...]:
    """Return the modules that multiply by matrices now, in the order of the operator."""
    of_attention, of_mlp = attention._modules, mlp._modules  # attributes of modules are slower to read
    merged, gate_up = of_attention["query_key_value"], of_mlp["gate_up"]
    assert merged is not None and gate_up is not None  # noqa: PT018
    # whatever wraps a merged layer calls it `linear` too, and then that is no layer the operator knows
    return (
        merged._modules.get("linear"),
        of_attention["output"],
        gate_up._modules.get("linear"),
        of_mlp["down"],
    )


def block_operands(
    attention_norm: FusedRMSNorm,
    attention: FusedAttention,
    mlp_norm: FusedRMSNorm,
    layers: tuple[nn.Module | None, ...],
) -> BlockOperands | None:
    """Return the operands of a block; None: its modules have to compute one by one.

    Args:
        layers: as `linears_of` returns them, or what those have inside.
    """
    found = [operands for layer in layers if (operands := operands_of(layer)) is not None]
    head_norms = attention.query_norm, attention.key_norm
    rows = dict(attention.query_key_value.parts)
    if (
        len(found) < len(layers)
        or any(norm is not None and norm.eps != attention_norm.eps for norm in (mlp_norm, *head_norms))
        or rows["query"] > MAX_GROUP * rows["key"]
    ):
        return None
    weights = [None if norm is None else norm.weight for norm in (attention_norm, mlp_norm, *head_norms)]
    return BlockOperands(
        linears=[operand for operands in found for operand in operands],
        outputs=[int(layer.out_features) for layer in layers if isinstance(layer, KINDS)],
        norms=[None if weight is None else weight.detach() for weight in weights],
        eps=attention_norm.eps,
        scale=attention.scale,
    )


def operands_of(layer: nn.Module | None) -> Operands | None:
    """Return what the operators multiply by for a layer; None: it is none that they know."""
    if isinstance(layer, PackedLinear):
        return layer.panels, None, None, layer.bias
    if isinstance(layer, Int8Linear) and layer.is_native:
        return layer.codes, layer.scales, layer.offsets, layer.bias
    if isinstance(layer, Int4Linear) and layer.is_native:
        return layer.codes, layer.scales, None, layer.bias
    return None
