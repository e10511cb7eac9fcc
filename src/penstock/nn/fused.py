"""A decoder's layers as they are computed in serving: merged products, and small work done in one pass.

Each does what its namesake of training does (`GroupedQueryAttention`, `SwiGLU`, `RMSNorm`) with the same
parameters. On CPUs with the C++ operators a layer's small work is four calls; elsewhere it is plain
PyTorch on merged products.
"""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from penstock.nn import native
from penstock.nn.attention import Attend, GroupedQueryAttention, LayerCache, Rope
from penstock.nn.kernels.hidden_pages import HiddenPages
from penstock.nn.kernels.paged import LayerPages, Paged
from penstock.nn.merged import MergedLinear
from penstock.nn.mlp import SwiGLU
from penstock.nn.norm import RMSNorm
from penstock.nn.rope import rotate


def has_operators(like: Tensor) -> bool:
    """Whether the C++ operators compute with tensors of this type and device."""
    is_of_type = like.dtype in (torch.float32, torch.bfloat16)
    return like.device.type == "cpu" and is_of_type and native.is_available()


class FusedRMSNorm(RMSNorm):
    """The norm by the C++ operator, alone or after a sum."""

    def forward(self, x: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        """Normalise over the last dim."""
        out: Tensor = torch.ops.penstock.rms_norm(x.contiguous(), self.weight, self.eps)
        return out

    def after_sum(
        self, x: Float[Tensor, "... size"], delta: Float[Tensor, "... size"], multiplier: float
    ) -> Float[Tensor, "... size"]:
        """Add `multiplier * delta` to `x` in place; return the sum's norm."""
        out: Tensor = torch.ops.penstock.add_rms_norm(x, delta, multiplier, self.weight, self.eps)
        return out

    @classmethod
    def of(cls, norm: RMSNorm) -> Self:
        """Take over a norm's weight."""
        made = cls(0, eps=norm.eps)
        made.weight = norm.weight
        return made


class FusedAttention(nn.Module):
    """Attention with one product for query, key and value."""

    def __init__(self, attention: GroupedQueryAttention) -> None:
        super().__init__()
        self.head_dim, self.scale = attention.head_dim, attention.scale
        self.query_key_value = MergedLinear.of(
            {"query": attention.query, "key": attention.key, "value": attention.value}
        )
        self.output = attention.output
        self.query_norm, self.key_norm = attention.query_norm, attention.key_norm
        self.has_operators = has_operators(attention.output.weight)

    def forward(
        self,
        x_blc: Float[Tensor, "batch seq hidden"],
        rope: Rope,
        attend: Attend,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """Mix tokens; with a cache, `x` follows the positions already in it."""
        qkv = self.query_key_value(x_blc)
        if self.has_operators and isinstance(cache, LayerPages) and isinstance(attend, Paged):
            q_thd = self._stored(qkv[0], rope, cache)
            mixed = attend.attend(q_thd, cache.keys, cache.values, scale=self.scale).flatten(1)[None]
        else:
            mixed = self._plain(qkv, rope, attend, cache)
        out: Tensor = self.output(mixed)
        return out

    def _stored(self, qkv: Tensor, rope: Rope, cache: LayerPages) -> Tensor:
        """Write the keys and values to their pages; return the queries, [t, h, d]."""
        q_norm = None if self.query_norm is None else self.query_norm.weight
        k_norm = None if self.key_norm is None else self.key_norm.weight
        eps = 0.0 if self.query_norm is None else self.query_norm.eps
        out: Tensor = torch.ops.penstock.rotate_and_store(
            qkv, *rope, cache.step.slots, cache.keys, cache.values, q_norm, k_norm, eps
        )
        return out

    def _plain(self, qkv: Tensor, rope: Rope, attend: Attend, cache: LayerCache | None) -> Tensor:
        q, k, v = (part.view(*part.shape[:-1], -1, self.head_dim) for part in self.query_key_value.split(qkv))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q_bhld, k_bkld = (rotate(t.transpose(1, 2), *rope) for t in (q, k))
        v_bkld = v.transpose(1, 2)
        if isinstance(cache, HiddenPages):
            return cache.attend(q_bhld, k_bkld, v_bkld, scale=self.scale)
        if cache is not None:
            k_bkld, v_bkld = cache.append(k_bkld, v_bkld)
        return attend(q_bhld, k_bkld, v_bkld, scale=self.scale).transpose(1, 2).flatten(2)


class FusedSwiGLU(nn.Module):
    """The feed-forward layer with one product for gate and up."""

    def __init__(self, mlp: SwiGLU) -> None:
        super().__init__()
        self.gate_up = MergedLinear.of({"gate": mlp.gate, "up": mlp.up})
        self.down = mlp.down
        self.has_operators = has_operators(mlp.down.weight)

    def forward(self, x: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        """Apply the layer to each token."""
        gate_up = self.gate_up(x)
        if self.has_operators:
            gated = torch.ops.penstock.silu_and_multiply(gate_up)
        else:
            gate, up = self.gate_up.split(gate_up)
            gated = functional.silu(gate) * up
        out: Tensor = self.down(gated)
        return out
