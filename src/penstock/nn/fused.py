"""Decoder layers for serving: merged products and fused elementwise operators.

Each layer computes the same as its counterpart in training (`GroupedQueryAttention`, `FeedForward`,
`RMSNorm`) from the same parameters. On CPUs with the C++ operators, the elementwise work of a layer is four
calls. Elsewhere it is plain PyTorch on merged products.

`BlockOperands` are the arguments of the C++ operator that computes a whole block, read from the block's
modules. A block has none if adapters, sums over ranks, or matrices that the operators do not support
replaced one of its modules by another type; its modules then compute one by one. The native decoder, which
adds and sums by itself (engine/model_runner/native_decoder.py), uses the operands of the layers inside.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from penstock.nn import native
from penstock.nn.attention import (
    Attend,
    GroupedQueryAttention,
    LayerCache,
    MeanSquares,
    Rope,
    given_sinks,
    given_softcap,
    normalise_heads,
    normalise_whole,
    parts_of,
    rotated,
)
from penstock.nn.kernels.paged import MAX_GROUP, LayerPages, Paged
from penstock.nn.kernels.paged_opaque import HiddenPages
from penstock.nn.linear.packed import MergedLinear, PackedLinear
from penstock.nn.linear.quantized import Int4Linear, Int8Linear
from penstock.nn.mlp import Activation, FeedForward, activate
from penstock.nn.norm import RMSNorm


def has_operators(like: Tensor) -> bool:
    """True if the C++ operators support tensors of this dtype and device."""
    is_of_type = like.dtype in (torch.float32, torch.bfloat16)
    return like.device.type == "cpu" and is_of_type and native.is_available()


class FusedRMSNorm(RMSNorm):
    """RMSNorm by the C++ operator, alone or after a residual sum."""

    def forward(self, x: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        """Normalise over the last dim."""
        out: Tensor = torch.ops.penstock.rms_norm(x.contiguous(), self.weight, self.eps, self.shift)
        return out

    def after_sum(
        self, x: Float[Tensor, "... size"], delta: Float[Tensor, "... size"], multiplier: float
    ) -> Float[Tensor, "... size"]:
        """Add `multiplier * delta` to `x` in place; return the norm of the sum."""
        out: Tensor = torch.ops.penstock.add_rms_norm(x, delta, multiplier, self.weight, self.eps, self.shift)
        return out

    @classmethod
    def of(cls, norm: RMSNorm) -> Self:
        """Return a fused norm that shares the weight of `norm`."""
        made = cls(0, eps=norm.eps, is_zero_centered=norm.is_zero_centered)
        made.weight = norm.weight
        return made


class FusedAttention(nn.Module):
    """Attention with one product for query, key and value."""

    def __init__(self, attention: GroupedQueryAttention) -> None:
        super().__init__()
        self.head_dim, self.scale = attention.head_dim, attention.scale
        self.sinks, self.softcap = attention.sinks, attention.softcap
        self.query_key_value = MergedLinear.of(
            {"query": attention.query, "key": attention.key, "value": attention.value}
        )
        self.output = attention.output
        self.qk_norm = attention.qk_norm
        self.norms_rotated = attention.qk_norm == "rotated"
        self.query_norm, self.key_norm = attention.query_norm, attention.key_norm
        self.mean_squares: MeanSquares | None = attention.mean_squares
        self.has_operators = has_operators(attention.output.weight)

    def forward(
        self,
        x_blc: Float[Tensor, "batch seq hidden"],
        rope: Rope,
        attend: Attend,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """Mix tokens of the rows; with a cache, `x` follows the positions already in it."""
        qkv = self.query_key_value(x_blc)
        has_all_heads = self.mean_squares is None
        if (
            self.has_operators
            and has_all_heads
            and isinstance(cache, LayerPages)
            and isinstance(attend, Paged)
        ):
            q_thd = self._stored(qkv[0], rope, cache)
            mixed = attend.attend(
                q_thd, cache.keys, cache.values, scale=self.scale, sinks=self.sinks, softcap=self.softcap
            ).flatten(1)[None]
        else:
            mixed = self._plain(qkv, rope, attend, cache)
        out: Tensor = self.output(mixed)
        return out

    def _stored(self, qkv: Tensor, rope: Rope, cache: LayerPages) -> Tensor:
        """Write the keys and values to their pages; return the rotated queries, [t, h, d]."""
        q_norm = None if self.query_norm is None else self.query_norm.weight
        k_norm = None if self.key_norm is None else self.key_norm.weight
        eps, shift = (0.0, 0.0) if self.query_norm is None else (self.query_norm.eps, self.query_norm.shift)
        cosines, sines, q_scales = parts_of(rope)
        out: Tensor = torch.ops.penstock.rotate_and_store(
            qkv, cosines, sines, cache.step.slots, cache.keys, cache.values, q_norm, k_norm, eps, shift,
            self.norms_rotated, q_scales,
        )  # fmt: skip
        return out

    def _plain(self, qkv: Tensor, rope: Rope, attend: Attend, cache: LayerCache | None) -> Tensor:
        q, k, v = self.query_key_value.split(qkv)
        if self.qk_norm == "whole":
            q, k = normalise_whole(self, q, k)
        q, k, v = (part.view(*part.shape[:-1], -1, self.head_dim) for part in (q, k, v))
        if self.qk_norm == "head":
            q, k = normalise_heads(self, q, k)
        q, k = rotated(q, k, rope)
        if self.qk_norm == "rotated":
            q, k = normalise_heads(self, q, k)
        q_bhld, k_bkld, v_bkld = (part.transpose(1, 2) for part in (q, k, v))
        if isinstance(cache, HiddenPages):
            return cache.attend(
                q_bhld, k_bkld, v_bkld, scale=self.scale, sinks=self.sinks, softcap=self.softcap
            )
        if cache is not None:
            k_bkld, v_bkld = cache.append(k_bkld, v_bkld)
        sinks, softcap = given_sinks(self.sinks), given_softcap(self.softcap)
        mixed = attend(q_bhld, k_bkld, v_bkld, scale=self.scale, **sinks, **softcap)  # type: ignore[arg-type]
        return mixed.transpose(1, 2).flatten(2)


class FusedFeedForward(nn.Module):
    """Feed-forward layer with one product for gate and up; without a gate it is that of up alone."""

    def __init__(self, mlp: FeedForward) -> None:
        super().__init__()
        self.activation, self.is_gated = mlp.activation, mlp.gate is not None
        gate = {} if mlp.gate is None else {"gate": mlp.gate}
        self.gate_up = MergedLinear.of({**gate, "up": mlp.up})
        self.down = mlp.down
        self.has_operators = has_operators(mlp.down.weight)

    def forward(self, x: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        """Apply the layer to each token."""
        gate_up = self.gate_up(x)
        if self.has_operators:
            inner = torch.ops.penstock.activate(gate_up, ACTIVATIONS.index(self.activation), self.is_gated)
        elif self.is_gated:
            gate, up = self.gate_up.split(gate_up)
            inner = activate(gate, self.activation) * up
        else:
            inner = activate(gate_up, self.activation)
        out: Tensor = self.down(inner)
        return out


ACTIVATIONS = get_args(Activation)
"""In the order of the operators' numbers (nn/native/gate.h)."""


KINDS = (PackedLinear, Int8Linear, Int4Linear)
"""Layers whose matrices the C++ operators can multiply by."""

Operands = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Tensors of one linear layer: panels, scales, offsets (None: tokens are not rounded), bias."""


@dataclass(frozen=True, slots=True)
class BlockOperands:
    """Arguments of the block operator that stay the same from step to step."""

    linears: list[Tensor | None]
    outputs: list[int]
    norms: list[Tensor | None]
    """Weights of the norms before attention and feed-forward, of queries and keys, and of the norms after
    attention and feed-forward; None: there is no such norm."""
    eps: float
    shift: float
    """Added to the weights of norms."""
    scale: float
    sinks: Tensor | None
    """Attention sinks, float32; None: the block has none."""
    activation: int
    """Index in ACTIVATIONS."""
    is_gated: bool
    norms_rotated: bool
    """True if queries and keys are normalised after the rotation."""
    softcap: float
    """Cap on the scores; 0: there is none."""

    def compute(
        self, x: Tensor, rope: Rope, attend: Paged, pages: LayerPages, *, multiplier: float
    ) -> Tensor:
        """Apply the block to `x` [1, t, c], in place."""
        step = pages.step
        cosines, sines, q_scales = parts_of(rope)
        torch.ops.penstock.decoder_block(
            x[0], cosines, sines, step.slots, step.query_starts, step.lengths, step.block_tables,
            pages.keys, pages.values,
            self.linears, self.outputs, self.norms, self.eps, self.shift, self.scale, multiplier,
            attend.window or 0, self.activation, self.is_gated, self.norms_rotated, q_scales, self.sinks,
            self.softcap,
        )  # fmt: skip
        return x


def linears_of(attention: FusedAttention, mlp: FusedFeedForward) -> tuple[nn.Module | None, ...]:
    """Return the linear layers of a block as they are now, in the operator's order."""
    of_attention, of_mlp = attention._modules, mlp._modules  # reading module attributes is slower
    merged, gate_up = of_attention["query_key_value"], of_mlp["gate_up"]
    assert merged is not None and gate_up is not None  # noqa: PT018
    # a wrapper of a merged layer has an attribute `linear` too, of a type that the operator does not support
    return (
        merged._modules.get("linear"),
        of_attention["output"],
        gate_up._modules.get("linear"),
        of_mlp["down"],
    )


def block_operands(
    attention: FusedAttention,
    mlp: FusedFeedForward,
    norms: Sequence[nn.Module | None],
    layers: tuple[nn.Module | None, ...],
) -> BlockOperands | None:
    """Return the operands of a block, or None if its modules have to compute one by one.

    Args:
        norms: before attention and feed-forward, and after them.
        layers: the result of `linears_of`, or the layers inside its wrappers.
    """
    found = [operands for layer in layers if (operands := operands_of(layer)) is not None]
    before, after = norms[:2], norms[2:]
    every = [*before, attention.query_norm, attention.key_norm, *after]
    known = [norm for norm in every if type(norm) in (RMSNorm, FusedRMSNorm)]
    rows = dict(attention.query_key_value.parts)
    if (
        len(found) < len(layers)
        or len(known) < sum(norm is not None for norm in every)
        or len({(norm.eps, norm.shift) for norm in known if isinstance(norm, RMSNorm)}) != 1
        or rows["query"] > MAX_GROUP * rows["key"]
    ):
        return None
    weights = [norm.weight if isinstance(norm, RMSNorm) else None for norm in every]
    norm = next(norm for norm in known if isinstance(norm, RMSNorm))
    return BlockOperands(
        linears=[operand for operands in found for operand in operands],
        outputs=[int(layer.out_features) for layer in layers if isinstance(layer, KINDS)],
        norms=[None if weight is None else weight.detach() for weight in weights],
        eps=norm.eps,
        shift=norm.shift,
        scale=attention.scale,
        sinks=None if attention.sinks is None else attention.sinks.detach().float().contiguous(),
        activation=ACTIVATIONS.index(mlp.activation),
        is_gated=mlp.is_gated,
        norms_rotated=attention.norms_rotated,
        softcap=attention.softcap or 0.0,
    )


def operands_of(layer: nn.Module | None) -> Operands | None:
    """Return the operator's tensors of a layer, or None if the operators do not support it."""
    if isinstance(layer, PackedLinear):
        return layer.panels, None, None, layer.bias
    if isinstance(layer, Int8Linear | Int4Linear) and layer.is_native:
        return layer.codes, layer.scales, layer.offsets, layer.bias
    return None
