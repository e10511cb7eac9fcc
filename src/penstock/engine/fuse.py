"""Swap a loaded model's layers for those of serving; the one place that knows which becomes which.

Comes before matrices are packed, quantised or given adapters: they find merged products then, whose
parts keep their names. Parameters are those of the model; what is merged is freed layer by layer, so
that the model is never in memory twice.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from penstock.models.llama.model import Block, Llama
from penstock.nn.attention import Attend, GroupedQueryAttention, LayerCache, Rope
from penstock.nn.fused import FusedAttention, FusedRMSNorm, FusedSwiGLU, has_operators
from penstock.nn.mlp import SwiGLU
from penstock.nn.norm import RMSNorm


class FusedBlock(nn.Module):
    """A block whose norms and residual sums are single passes; `x` is changed in place."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.residual_multiplier = block.residual_multiplier
        self.attention_norm, self.attention = block.attention_norm, block.attention
        self.mlp_norm, self.mlp = block.mlp_norm, block.mlp

    def forward(
        self,
        x: Float[Tensor, "batch seq hidden"],
        rope: Rope,
        attend: Attend,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """Apply the block."""
        assert isinstance(self.mlp_norm, FusedRMSNorm), type(self.mlp_norm)
        mixed = self.attention(self.attention_norm(x), rope, attend, cache)
        delta = self.mlp(self.mlp_norm.after_sum(x, mixed, self.residual_multiplier))
        return x.add_(delta, alpha=self.residual_multiplier)


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
