"""Low-rank adapters of linear layers: method, rank, scale and layers; no torch.

An adapter adds `scale * B A x` to the outputs `W x` of a frozen layer; A is [rank, inputs] and B is [outputs,
rank] (LoRA; Hu et al., arXiv:2106.09685). With rsLoRA the scale falls with the root of the rank, so that
large ranks learn as fast as small ones (Kalajdzievski, arXiv:2312.03732). DoRA also learns the length of each
row of `W + scale * B A` (Liu et al., arXiv:2402.09353).
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from penstock.core.errors import ConfigError, nearest

T = TypeVar("T")
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

MIN_RATE = 0.001
"""Smallest dropout of an adapter's inputs; rates are rounded to multiples of 1 / 65536."""
GROUP = 32
"""Inputs that share a scale in a matrix of 4 bits."""

_GROUPS = {
    "all": LINEAR_LAYERS,
    "all-linear": LINEAR_LAYERS,
    "attention": ATTENTION,
    "self_attn": ATTENTION,
    "mlp": MLP,
    "qkv_proj": ("query", "key", "value"),
    "gate_up_proj": ("gate", "up"),
    "input_linear": ("gate", "up"),
    "output_linear": ("down",),
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
    saved: tuple[str, ...] = ()
    """Names of modules that are trained whole, as the model has them: `embed`, `layers.0.mlp_norm`."""
    dropout: float = 0.0
    """Share of an adapted layer's inputs that its adapter does not see in a training step."""
    blocks: tuple[int, ...] = ()
    """Numbers of the blocks whose layers are adapted; empty: all."""
    pattern: str = ""
    """Regular expression that matches the whole name of an adapted layer; "": no condition."""
    excluded: tuple[str, ...] = ()
    """Last parts of names, or regular expressions of whole names, of layers that are not adapted."""
    ranks: tuple[tuple[str, int], ...] = ()
    """(regular expression of the last parts of a name, rank); the first that fits counts."""
    alphas: tuple[tuple[str, float], ...] = ()
    """(regular expression of the last parts of a name, alpha); likewise."""

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

    def of(self, name: str) -> "AdapterConfig | None":
        """Return the adapter of one layer, with its own rank and alpha; None: the layer is not adapted.

        Args:
            name: of the layer in the model: `layers.3.attention.query`. Patterns may mean this name, or
                Hugging Face's: `model.layers.3.self_attn.q_proj`.

        >>> some = AdapterConfig(method="lora", rank=8, alpha=8.0, layers=LINEAR_LAYERS, blocks=(0, 2),
        ...     excluded=("down_proj",), ranks=(("mlp.up_proj", 4),))
        >>> some.of("layers.0.attention.query").rank, some.of("layers.2.mlp.up").rank
        (8, 4)
        >>> some.of("layers.1.attention.query"), some.of("layers.0.mlp.down")
        (None, None)
        """
        kind = name.rpartition(".")[2]
        if name != OUTPUT_MATRIX:
            if kind not in self.layers or (self.blocks and int(name.split(".")[1]) not in self.blocks):
                return None
        elif not self.unembed:
            return None
        names = (name, _hugging_face_name(name))
        if self.pattern and not any(re.fullmatch(self.pattern, one) for one in names):
            return None
        if any(is_excluded(text, name) for text in self.excluded):
            return None
        return replace(
            self,
            rank=_of_pattern(self.ranks, names, self.rank),
            alpha=_of_pattern(self.alphas, names, self.alpha),
        )

    def of_stored(self, module: str) -> "AdapterConfig":
        """Return the adapter of a stored matrix, with its own rank and alpha.

        Args:
            module: its name in a model folder: `model.layers.3.self_attn.qkv_proj`.
        """
        return replace(
            self,
            rank=_of_pattern(self.ranks, (module,), self.rank),
            alpha=_of_pattern(self.alphas, (module,), self.alpha),
        )

    def trains(self, name: str) -> bool:
        """Return True if a parameter of the base, by its name, is trained whole.

        >>> AdapterConfig(method="lora", rank=1, alpha=1.0, layers=(), saved=("norm",)).trains("norm.weight")
        True
        """
        return name.rpartition(".")[0] in self.saved

    def within(self, names: Iterable[str]) -> "AdapterConfig":
        """Return the adapter with the layers that its patterns leave in at least one block.

        Args:
            names: linear layers of the blocks of a model.
        """
        found = {name.rpartition(".")[2] for name in names if self.of(name) is not None}
        return replace(
            self,
            layers=tuple(kind for kind in self.layers if kind in found),
            unembed=self.of(OUTPUT_MATRIX) is not None,
        )

    def alike(self) -> "AdapterConfig":
        """Return an adapter of all layers in all blocks with the largest rank: a bound of its memory."""
        largest = max([self.rank, *(rank for _, rank in self.ranks)])
        return replace(self, rank=largest, blocks=(), pattern="", excluded=(), ranks=(), alphas=())

    def num_parameters(self, outputs: int, inputs: int) -> int:
        """Return the number of learned numbers of one layer of this shape.

        >>> AdapterConfig(method="dora", rank=2, alpha=2.0, layers=("up",)).num_parameters(30, 10)
        110
        """
        return self.rank * (outputs + inputs) + (outputs if self.has_magnitudes else 0)


def is_group_or_layer(name: str) -> bool:
    """Return True if a text is a name that `layers_named` knows."""
    return name in _GROUPS or name in _OF_HUGGING_FACE or name in (*LINEAR_LAYERS, OUTPUT_MATRIX)


def is_named(pattern: str, name: str) -> bool:
    """Return True if a pattern fits the last parts of a layer's name, or of its name in Hugging Face.

    >>> is_named("q_proj", "layers.0.attention.query"), is_named("layers.1.*", "layers.0.attention.query")
    (True, False)
    """
    return any(_is_whole(rf"(.*\.)?({pattern})", one) for one in (name, _hugging_face_name(name)))


def is_excluded(text: str, name: str) -> bool:
    """Return True if a text is the last parts of a layer's name, or a regular expression of its whole name.

    >>> is_excluded("mlp.up_proj", "layers.0.mlp.up"), is_excluded("(q|k)_proj", "layers.0.attention.query")
    (True, False)
    """
    return any(_ends_with(one, text) or _is_whole(text, one) for one in (name, _hugging_face_name(name)))


def _hugging_face_name(name: str) -> str:
    """Return the name of a layer of a transformers model.

    >>> _hugging_face_name("layers.3.mlp.down"), _hugging_face_name("unembed")
    ('model.layers.3.mlp.down_proj', 'lm_head')
    """
    theirs = {ours: name for name, ours in _OF_HUGGING_FACE.items()}
    if name == OUTPUT_MATRIX:
        return theirs[name]
    block, _, kind = name.rpartition(".")
    return f"model.{block.replace('attention', 'self_attn')}.{theirs[kind]}"


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _is_whole(pattern: str, name: str) -> bool:
    return re.fullmatch(pattern, name) is not None


def _of_pattern(table: tuple[tuple[str, T], ...], names: tuple[str, ...], default: T) -> T:
    """Return the value of the first pattern that the last parts of a name match, as PEFT does."""
    fits = (value for pattern, value in table if any(_is_whole(rf"(.*\.)?({pattern})", one) for one in names))
    return next(fits, default)


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
