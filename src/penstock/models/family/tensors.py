"""How the tensors of a family are stored in a model folder; no torch.

A parameter of the network is a selection of rows of one stored tensor. That covers parts of a fused tensor
(consecutive rows), and rotary embedding in another layout (the rows of each head in another order):

- our network pairs dimension i of a head with i + head_dim / 2;
- some families pair 2i with 2i + 1 ("interleaved"), and some rotate the first dimensions of a head only.

Attention does not depend on the order of a head's dimensions, as long as queries and keys have the same one.
So those families need no switch in the network: their queries and keys are reordered when a folder is read,
and back when one is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.models.decoder.config import DecoderConfig

_MODEL = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "unembed.weight": "lm_head.weight",
}
_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_Shapes = Mapping[str, tuple[int, ...]]
_ROTATED = ("attention.query", "attention.key", "attention.query_norm", "attention.key_norm")
"""Modules whose outputs, or whose weights, are dimensions of heads that rotary embedding turns."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a stored tensor that are a parameter of the network."""

    tensor: str
    """Name of the stored tensor."""
    rows: Sequence[int]
    """Its rows, in the order of the parameter's."""
    num_rows: int
    """Number of rows of the stored tensor."""

    @property
    def is_whole(self) -> bool:
        """True if the parameter is the stored tensor as it is."""
        return self.rows == range(self.num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """Names and order of a family's stored tensors."""

    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Module of our block -> stored module, where they differ from Llama's."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Stored module of a block -> the modules of ours that its rows are, in order."""
    has_interleaved_rope: bool = False
    """True if rotary embedding pairs dimensions 2i and 2i + 1 of a head."""

    def rows_of(self, config: "DecoderConfig") -> dict[str, StoredRows]:
        """Return where each parameter of a model is stored, by its name, in model order."""
        layers, found = config.layers, {}
        blocks = {kind: self._of_block(config.block_shapes(kind), config) for kind in set(layers)}
        for name, shape in config.parameter_shapes.items():
            if name in _MODEL:
                found[name] = StoredRows(_MODEL[name], range(shape[0]), shape[0])
                continue
            _, layer, inside = name.split(".", 2)
            inner = blocks[layers[int(layer)]][inside]
            found[name] = StoredRows(f"model.layers.{layer}.{inner.tensor}", inner.rows, inner.num_rows)
        return found

    def _of_block(self, shapes: _Shapes, config: "DecoderConfig") -> dict[str, StoredRows]:
        return {name: self._of_parameter(name, shapes, config) for name in shapes}

    def _of_parameter(self, name: str, shapes: _Shapes, config: "DecoderConfig") -> StoredRows:
        module, _, kind = name.rpartition(".")
        count = shapes[name][0]
        rows = self._in_head_order(count, config) if module in _ROTATED else range(count)
        for stored, parts in self.fused.items():
            if module in parts:
                sizes = [shapes[f"{part}.{kind}"][0] for part in parts]
                first = sum(sizes[: parts.index(module)])
                return StoredRows(f"{stored}.{kind}", _shifted(rows, first), sum(sizes))
        return StoredRows(f"{self.names.get(module) or _BLOCK[module]}.{kind}", rows, len(rows))

    def _in_head_order(self, count: int, config: "DecoderConfig") -> Sequence[int]:
        # Of a head of 8, 4 are rotated, interleaved: the stored pairs (0, 1) and (2, 3) are our (0, 4)
        # and (1, 5). The stored rows 4 to 7 are not rotated, and are our rows 2, 3, 6 and 7.
        head, rotated = config.size_of_head, config.rotated_dims
        half, pairs = head // 2, rotated // 2
        order = [0] * head
        for i in range(pairs):
            both = (2 * i, 2 * i + 1) if self.has_interleaved_rope else (i, i + pairs)
            order[i], order[i + half] = both
        for index, i in enumerate(range(pairs, half)):  # these are not rotated
            order[i], order[i + half] = rotated + index, rotated + index + half - pairs
        if order == [*range(head)]:
            return range(count)
        return tuple(first + row for first in range(0, count, head) for row in order)


def _shifted(rows: Sequence[int], first: int) -> Sequence[int]:
    if isinstance(rows, range):
        return range(first, first + len(rows))
    return tuple(first + row for row in rows)
