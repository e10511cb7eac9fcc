"""Replace the layers of a loaded model by serving layers: fused, packed, quantized.

Run before matrices are packed or quantized and before adapters are added. Merged layers keep the names of
their parts. Parameters are those of the model; merged ones are freed layer by layer, so the model is never in
memory twice.

    chosen (of "auto") -> convert (dtype of everything) -> fuse -> prepare (the matrices)

Every plain linear layer is replaced in place, so wrappers around it (merged parts, an adapter, the sum over
ranks) stay. A matrix is freed as soon as its layer has its own copy, and a memory-mapped one never took
memory: the peak is one model and one matrix.

Embeddings stay as they are, because a lookup reads one row. A tied output matrix gets a copy of its own,
because every token reads it whole.
"""

from collections.abc import Callable
from functools import partial
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from penstock.core import env
from penstock.core.errors import ConfigError, nearest
from penstock.engine.config import Activations, Weights
from penstock.models.decoder.model import Block, Decoder
from penstock.nn import native
from penstock.nn.attention import Attend, GroupedQueryAttention, LayerCache, Rope
from penstock.nn.fused import (
    BlockOperands,
    FusedAttention,
    FusedFeedForward,
    FusedRMSNorm,
    block_operands,
    has_operators,
    linears_of,
)
from penstock.nn.kernels.paged import LayerPages, Paged
from penstock.nn.linear.float8 import RECIPES, has_native
from penstock.nn.linear.packed import packed
from penstock.nn.linear.quantized import Float8Linear, Int4Linear, Int8Linear, multiplies_integers
from penstock.nn.mlp import FeedForward
from penstock.nn.norm import RMSNorm


class FusedBlock(nn.Module):
    """A block of both parts whose norms and residual sums are fused; `x` is changed in place."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        assert block.attention is not None and block.mlp is not None  # noqa: PT018
        self.residual_multiplier = block.residual_multiplier
        self.attention_norm, self.attention = block.attention_norm, block.attention
        self.attention_out_norm, self.mlp_out_norm = block.attention_out_norm, block.mlp_out_norm
        self.mlp_norm, self.mlp = block.mlp_norm, block.mlp
        self._operands: BlockOperands | None = None
        self._layers: tuple[nn.Module | None, ...] | None = None

    def forward(
        self,
        x: Float[Tensor, "batch seq hidden"],
        rope: Rope,
        attend: Attend | None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """Apply the block."""
        operands = self.operands_now()
        if operands is not None and isinstance(cache, LayerPages) and isinstance(attend, Paged):
            return operands.compute(x, rope, attend, cache, multiplier=self.residual_multiplier)
        mixed = self.attention(
            x if self.attention_norm is None else self.attention_norm(x), rope, attend, cache
        )
        if self.attention_out_norm is not None:
            mixed = self.attention_out_norm(mixed)
        if isinstance(self.mlp_norm, FusedRMSNorm):
            delta = self.mlp(self.mlp_norm.after_sum(x, mixed, self.residual_multiplier))
        else:
            assert self.mlp_norm is None, type(self.mlp_norm)
            delta = self.mlp(x.add_(mixed, alpha=self.residual_multiplier))
        if self.mlp_out_norm is not None:
            delta = self.mlp_out_norm(delta)
        return x.add_(delta, alpha=self.residual_multiplier)

    @classmethod
    def of(cls, block: Block) -> nn.Module:
        """Return the fused block; the block itself if it lacks a part, so that its modules compute one by
        one."""
        return block if block.attention is None or block.mlp is None else cls(block)

    def operands_now(self) -> BlockOperands | None:
        """Return the operands; computed again whenever a layer was packed, quantized or wrapped."""
        layers = self.linears_now()
        if layers != self._layers:  # modules compare by identity
            self._operands, self._layers = self.operands_with(layers), layers
        return self._operands

    def linears_now(self) -> tuple[nn.Module | None, ...]:
        """Return the block's linear layers, in the order of `linears_of`."""
        attention, mlp = self._modules["attention"], self._modules["mlp"]
        assert isinstance(attention, FusedAttention) and isinstance(mlp, FusedFeedForward)  # noqa: PT018
        return linears_of(attention, mlp)

    def operands_with(self, layers: tuple[nn.Module | None, ...]) -> BlockOperands | None:
        """Return the operands with `layers` in place of those of `linears_now`."""
        assert isinstance(self.attention, FusedAttention), type(self.attention)
        assert isinstance(self.mlp, FusedFeedForward), type(self.mlp)
        norms = self.attention_norm, self.mlp_norm, self.attention_out_norm, self.mlp_out_norm
        return block_operands(self.attention, self.mlp, norms, layers)


MERGED: dict[type[nn.Module], Callable[..., nn.Module]] = {
    GroupedQueryAttention: FusedAttention,
    FeedForward: FusedFeedForward,
}
"""Replacements on every device."""

OPERATORS: dict[type[nn.Module], Callable[..., nn.Module]] = {RMSNorm: FusedRMSNorm.of, Block: FusedBlock.of}
"""Replacements where the C++ operators are available."""


@torch.no_grad()
def fuse(model: Decoder) -> None:
    """Replace the layers in place; the model computes the same, for inference only."""
    table = MERGED | OPERATORS if has_operators(model.norm.weight) else MERGED
    _swap(model, table)


def _swap(module: nn.Module, table: dict[type[nn.Module], Callable[..., nn.Module]]) -> None:
    for name, child in module.named_children():
        _swap(child, table)
        if make := table.get(type(child)):
            setattr(module, name, make(child))


Make = Callable[[nn.Linear], nn.Module]
"""Returns the replacement of a plain linear layer."""

OUTPUT = "unembed"
"""Name of the output projection, from hidden states to logits."""


def chosen(weights: Weights, like: Tensor) -> tuple[Weights, Weights]:
    """Return what `convert` and `prepare` are to make of a model; `weights`, unless that is "auto".

    Args:
        like: a parameter: the model's dtype and device.
    """
    if weights != "auto":
        return weights, weights
    if like.device.type != "cpu":
        return ("bfloat16" if like.dtype == torch.float32 else "stored"), "stored"
    is_multiplied = bool({"avx512_bf16", "amx_bf16"} & set(env.cpu_features().split()))
    plain: Weights = "bfloat16" if is_multiplied else "float32"
    if not native.is_available():
        return plain, "stored"
    return plain if is_multiplied or like.dtype == torch.float16 else "stored", "int8"


def convert(model: Decoder, weights: Weights) -> None:
    """Cast a model in place to the float dtype that `weights` names; other formats change nothing."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(weights)
    if dtype is not None:
        model.to(dtype)


@torch.no_grad()
def prepare(model: Decoder, weights: Weights, activations: Activations = "stored") -> None:
    """Replace the weight matrices in place by packed or quantized ones; the model cannot be trained or saved
    after.

    Norms, embedding and activations keep their dtype. The model must be on its device.

    Args:
        activations: int8: round them in products with int8 and int4 matrices.

    Raises:
        ConfigError: unknown format, or the device has no instructions for it.
    """
    make, make_output = _makers(weights, activations, model.embed.weight.device)
    if model.unembed is None:
        model.unembed = _output_of(model.embed)
    for name in [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]:
        parent, _, last = name.rpartition(".")
        owner = model.get_submodule(parent)
        # no other reference to the old layer: its matrix is freed before the next one is made
        setattr(owner, last, (make_output if name == OUTPUT else make)(getattr(owner, last)))


def _makers(weights: Weights, activations: Activations, device: torch.device) -> tuple[Make, Make]:
    """Return constructors of the layers and of the output projection, which 4 bits would hurt most."""
    rounds = activations == "int8"
    if rounds and (device.type != "cpu" or not multiplies_integers()):
        raise ConfigError(
            "Rounded activations gain time on CPUs with VNNI only",
            got=f"{device.type} without it" if device.type == "cpu" else device.type,
            fix="Leave activations out: int8 and int4 weights are multiplied with exact activations.",
        )
    if weights in ("stored", "float32", "bfloat16"):
        return packed, packed
    if weights == "int8":
        return partial(Int8Linear, rounds=rounds), partial(Int8Linear, rounds=rounds)
    if weights == "int4":
        return partial(Int4Linear, rounds=rounds), partial(Int8Linear, rounds=rounds)
    if weights == "float8":
        if not has_native(RECIPES["float8_rowwise"], device.type):
            raise ConfigError("This device has no float8 instructions", got=device.type, fix="Choose int8.")
        return partial(Float8Linear, is_native=True), packed
    raise ConfigError("Unknown format of weights", got=weights, fix=nearest(weights, list(get_args(Weights))))


def _output_of(embed: nn.Embedding) -> nn.Linear:
    rows, hidden_size = embed.weight.shape
    layer = nn.Linear(hidden_size, rows, bias=False, device="meta")
    layer.weight = embed.weight
    return layer
