"""Kinds of layers: the parts of a decoder block; no torch.

Layers of one kind are alike in all but their weights. Whatever is counted over the network is a sum over its
layers, or over its kinds of layers times their number.
"""

from dataclasses import dataclass
from typing import Literal

from penstock.nn.rope_scaling import RopeRule


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Attention of a layer, as far as it may differ from that of others."""

    window: int | None
    """A token sees itself and `window - 1` before it; None: the whole context."""
    rope: RopeRule
    """Rotary embedding; that of a layer without positions rotates nothing."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Parts of a block, each with its norms and a residual connection.

    >>> LayerKind(attention=None).parts
    ('mlp',)
    """

    attention: AttentionKind | None
    """None: no attention, so nothing in the KV cache."""
    feed_forward: Literal["mlp"] | None = "mlp"
    """None: no feed-forward layer."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts, in the order of a forward pass."""
        return ("attention",) * (self.attention is not None) + ("mlp",) * (self.feed_forward is not None)
