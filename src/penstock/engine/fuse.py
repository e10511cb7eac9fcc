"""Swap a loaded model's layers for those of serving; the one place that knows which becomes which.

Comes before matrices are packed or rounded and before anything is added to them: whoever does so finds merged
products, whose parts keep their names. Parameters are those of the model; what is merged is freed layer by
layer, so that the model is never in memory twice.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from penstock.models.llama.model import Block, Llama
from penstock.nn.attention import Attend, GroupedQueryAttention, LayerCache, Rope
from penstock.nn.block_operands import BlockOperands, block_operands, linears_of
from penstock.nn.fused import FusedAttention, FusedRMSNorm, FusedSwiGLU, has_operators
from penstock.nn.kernels.paged import LayerPages, Paged
from penstock.nn.mlp import SwiGLU
from penstock.nn.norm import RMSNorm


class FusedBlock(nn.Module):
    """A block whose norms and residual sums are single passes; `x` is changed in place."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.residual_multiplier = block.residual_multiplier
        self.attention_norm, self.attention = block.attention_norm, block.attention
        self.mlp_norm, self.mlp = block.mlp_norm, block.mlp
        self._operands: BlockOperands | None = None
        self._layers: tuple[nn.Module | None, ...] | None = None

    def forward(
        self,
        x: Float[Tensor, "batch seq hidden"],
        rope: Rope,
        attend: Attend,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """Apply the block."""
        operands = self.operands_now()
        if operands is not None and isinstance(cache, LayerPages) and isinstance(attend, Paged):
            return operands.compute(x, rope, attend, cache, multiplier=self.residual_multiplier)
        assert isinstance(self.mlp_norm, FusedRMSNorm), type(self.mlp_norm)
        mixed = self.attention(self.attention_norm(x), rope, attend, cache)
        delta = self.mlp(self.mlp_norm.after_sum(x, mixed, self.residual_multiplier))
        return x.add_(delta, alpha=self.residual_multiplier)

    def operands_now(self) -> BlockOperands | None:
        """Return them, anew whenever a layer was replaced: packed, rounded, or wrapped by an adapter."""
        layers = self.linears_now()
        if layers != self._layers:  # modules are equal if they are the same
            self._operands, self._layers = self.operands_with(layers), layers
        return self._operands

    def linears_now(self) -> tuple[nn.Module | None, ...]:
        """Return the layers that multiply by matrices, as `linears_of` does."""
        attention, mlp = self._modules["attention"], self._modules["mlp"]
        assert isinstance(attention, FusedAttention) and isinstance(mlp, FusedSwiGLU)  # noqa: PT018
        return linears_of(attention, mlp)

    def operands_with(self, layers: tuple[nn.Module | None, ...]) -> BlockOperands | None:
        """Return the operands as if the layers of `linears_now` were these."""
        assert isinstance(self.attention, FusedAttention), type(self.attention)
        assert isinstance(self.attention_norm, FusedRMSNorm), type(self.attention_norm)
        assert isinstance(self.mlp_norm, FusedRMSNorm), type(self.mlp_norm)
        return block_operands(self.attention_norm, self.attention, self.mlp_norm, layers)


MERGED: dict[type[nn.Module], Callable[..., nn.Module]] = {
    GroupedQueryAttention: FusedAttention,
    SwiGLU: FusedSwiGLU,
}
"""On every device."""

OPERATORS: dict[type[nn.Module], Callable[..., nn.Module]] = {RMSNorm: FusedRMSNorm.of, Block: FusedBlock}
"""Where the C++ operators compute."""


@torch.no_grad()
def fuse(model: Llama) -> None:
    """Swap the layers in place; the model then computes what it did, for inference only."""
    table = MERGED | OPERATORS if has_operators(model.norm.weight) else MERGED
    _swap(model, table)


def _swap(module: nn.Module, table: dict[type[nn.Module], Callable[..., nn.Module]]) -> None:
    for name, child in module.named_children():
        _swap(child, table)
        if make := table.get(type(child)):
            setattr(module, name, make(child))
