"""Low-rank adapters of linear layers: method, rank, scale and layers; no torch.

An adapter adds `scale * B A x` to the outputs `W x` of a frozen layer; A is [rank, inputs] and B is [outputs,
rank] (LoRA; Hu et al., arXiv:2106.09685). With rsLoRA the scale falls with the root of the rank, so that
large ranks learn as fast as small ones (Kalajdzievski, arXiv:2312.03732). DoRA also learns the length of each
row of `W + scale * B A` (Liu et al., arXiv:2402.09353).
"""

import math
from dataclasses import dataclass
from typing import Literal

from penstock.core.errors import ConfigError, nearest

Method = Literal["lora", "rslora", "dora"]
BaseWeights = Literal["compute", "int8", "int4"]

ATTENTION = ("query", "key", "value", "output")
MLP = ("gate", "up", "down")
LINEAR_LAYERS = (*ATTENTION, *MLP)
"""Linear layers of a block, in the order of a forward pass."""
OUTPUT_MATRIX = "unembed"
"""The linear layer after the blocks, to the logits; `lm_head` of Hugging Face."""

MAX_RANK = 512
"""Largest rank that is trained and read: of folders of unknown origin, memory grows with it."""

GROUP = 32
"""Inputs that share a scale in a matrix of 4 bits."""

_GROUPS = {
    "all": LINEAR_LAYERS,
    "all-linear": LINEAR_LAYERS,
    "attention": ATTENTION,
    "self_attn": ATTENTION,
    "mlp": MLP,
}
"""Groups of layers; those with a hyphen or an underscore are PEFT's and Hugging Face's names."""
_OF_HUGGING_FACE = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "lm_head": OUTPUT_MATRIX,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """An adapter's method, size and place, and the storage of the frozen weights that it was trained on."""

    method: Method
    rank: int
    alpha: float
    layers: tuple[str, ...]
    """Names of the adapted layers of the blocks, a part of LINEAR_LAYERS."""
    unembed: bool = False
    """The output matrix is adapted too."""
    base: BaseWeights = "compute"
    """Storage of the blocks' adapted frozen weights: the dtype of compute, or rounded to 8 or 4 bits."""
    new_rows: int = 0
    """Token ids that the base lacks: their rows of the embedding and the output matrix are trained too."""

    @property
    def scale(self) -> float:
        """Factor on the product of B and A.

        >>> lora = AdapterConfig(method="lora", rank=16, alpha=32.0, layers=("query",))
        >>> lora.scale, AdapterConfig(method="rslora", rank=16, alpha=32.0, layers=("query",)).scale
        (2.0, 8.0)
        """
        return self.alpha / (math.sqrt(self.rank) if self.method == "rslora" else self.rank)

    @property
    def has_magnitudes(self) -> bool:
        """True if each output of an adapted layer has a learned length (DoRA)."""
        return self.method == "dora"

    def num_parameters(self, outputs: int, inputs: int) -> int:
        """Return the number of learned numbers of one layer of this shape.

        >>> AdapterConfig(method="dora", rank=2, alpha=2.0, layers=("up",)).num_parameters(30, 10)
        110
        """
        return self.rank * (outputs + inputs) + (outputs if self.has_magnitudes else 0)


def layers_named(wanted: str | tuple[str, ...], *, key: str) -> tuple[str, ...]:
    """Return the layers that a group or a list of names stands for, in the order of a forward pass.

    Groups are "all", "attention" and "mlp", of the blocks. The output matrix is named by itself, or in a list
    with others. A name may also be the one of Hugging Face, such as `q_proj`, or PEFT's `all-linear`.

    Args:
        key: name of the setting, for messages.

    Raises:
        ConfigError: a name is unknown, or none is given.

    >>> layers_named("attention", key="layers"), layers_named(("up", "query"), key="layers")
    (('query', 'key', 'value', 'output'), ('query', 'up'))
    >>> layers_named(("unembed", "mlp"), key="layers")
    ('gate', 'up', 'down', 'unembed')
    >>> layers_named(("v_proj", "query", "lm_head"), key="layers")
    ('query', 'value', 'unembed')
    """
    given = (wanted,) if isinstance(wanted, str) else wanted
    known = (*LINEAR_LAYERS, OUTPUT_MATRIX)
    for name in given:
        if name not in known and name not in _GROUPS and name not in _OF_HUGGING_FACE:
            raise ConfigError(
                f"{key} names a layer that the model does not have",
                got=name,
                fix=nearest(name, [*known, *_GROUPS, *_OF_HUGGING_FACE]),
            )
    names = [_OF_HUGGING_FACE.get(name, name) for name in given]
    if not names:
        raise ConfigError(f"{key} names no layer", got=list(names), fix='Name some, or write "all".')
    found = {layer for name in names for layer in _GROUPS.get(name, (name,))}
    return tuple(name for name in known if name in found)
