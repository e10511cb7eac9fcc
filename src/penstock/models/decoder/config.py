"""Config of a decoder of any family, with the field names of Hugging Face; no torch."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod
from typing import Literal

from penstock.core.errors import ConfigError
from penstock.models.decoder.layer_kind import AttentionKind, LayerKind
from penstock.models.families import FAMILY, ModelType, families_with, supported_families
from penstock.models.family.base import NEUTRAL, Family
from penstock.models.family.tensors import StoredRows
from penstock.nn.rope_scaling import RopeRule, RopeScaling

LayerType = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Config of one decoder; defaults are those of Llama, and features of other families are off."""

    model_type: ModelType = "llama"
    """Network type in `config.json`; decides which fields below may be set."""
    vocab_size: int
    """Number of token ids; rows of the embedding."""
    hidden_size: int
    """Width of the hidden states."""
    intermediate_size: int
    """Width of the feed-forward layer."""
    num_hidden_layers: int
    """Number of blocks."""
    num_attention_heads: int
    """Number of query heads."""
    num_key_value_heads: int | None = None
    """Number of key-value heads, a divisor of the query heads; absent: as many. Fewer: a smaller KV cache."""
    head_dim: int | None = None
    """Size of a head, even; absent: hidden_size / num_attention_heads."""
    max_position_embeddings: int = 2048
    """Context length in tokens."""
    rope_theta: float = 10_000.0
    """Base of the rotary embedding's wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies for long contexts."""
    layer_rope_theta: tuple[float, ...] | None = None
    """SmolLM3, Granite SWA: base of each layer's wavelengths, 0 for a layer without positions; absent:
    `rope_theta`."""
    scaled_layers: LayerType | None = None
    """Kind of layers that `rope_scaling` applies to; absent: all."""
    rms_norm_eps: float = 1e-6
    """Epsilon of RMSNorm: added to the mean square."""
    tie_word_embeddings: bool = False
    """Use the embedding as the output matrix too."""
    attention_bias: bool = False
    """Biases in the attention projections; Qwen 2 always has them, in three of the four."""
    attention_out_bias: bool | None = None
    """Seed-OSS: bias in the output projection; absent: as `attention_bias` says."""
    mlp_bias: bool = False
    """Biases in the feed-forward projections."""
    sliding_window: int | None = None
    """Attention window: a token sees itself and `sliding_window - 1` before; absent: all."""
    max_window_layers: int = 0
    """Qwen: number of first layers without a window."""
    layer_types: tuple[LayerType, ...] | None = None
    """Ministral, CWM, Qwen: which layers have the window, one by one; absent: as `max_window_layers` says."""
    partial_rotary_factor: float = 1.0
    """GLM, Phi, Granite 4.0: part of each head that rotary embedding turns, from 0 to 1."""
    embedding_multiplier: float = 1.0
    """Granite: factor on the embeddings."""
    attention_multiplier: float | None = None
    """Granite: factor on the attention scores; absent: 1 / sqrt(head_dim)."""
    residual_multiplier: float = 1.0
    """Granite: factor on the outputs of attention and feed-forward layers."""
    logits_scaling: float = 1.0
    """Granite: divisor of the logits."""
    attn_logit_softcapping: float | None = None
    """Gemma 2: attention scores become cap x tanh(score / cap); absent: there is no cap."""
    final_logit_softcapping: float | None = None
    """Gemma 2: logits become cap x tanh(logit / cap); absent: there is no cap."""
    ignored_keys: tuple[str, ...] = ()
    """Keys of the start folder's `config.json` to pass over, with a warning, though Penstock does not read
    them; `--ignore-key` adds one. Other keys that it does not know are refused."""

    def __post_init__(self) -> None:
        """Raise ConfigError for impossible shapes and fields of other families."""
        if self.model_type not in FAMILY:
            raise ConfigError(
                "This family of models is not supported", got=self.model_type, fix=supported_families()
            )
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ConfigError(f"{name} must be positive", got=value)
        check_ceilings({name: getattr(self, name) for name in _MAX})
        self._check_heads()
        self._check_family()

    def _check_heads(self) -> None:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"num_attention_heads must divide hidden_size {self.hidden_size}",
                got=self.num_attention_heads,
                fix="Change one of them, or set head_dim.",
            )
        if self.num_attention_heads % self.key_value_heads:
            raise ConfigError(
                f"num_key_value_heads must divide num_attention_heads {self.num_attention_heads}",
                got=self.num_key_value_heads,
            )
        if self.size_of_head % 2:
            raise ConfigError("head_dim must be even, for rotary embedding", got=self.size_of_head)
        least = 1 if self.family.rotates_part else 0
        if not least <= self.rotated_dims <= self.size_of_head or self.rotated_dims % 2:
            raise ConfigError(
                f"partial_rotary_factor must give an even number of a head's {self.size_of_head} dimensions",
                got=self.partial_rotary_factor,
            )

    def _check_family(self) -> None:
        for name, neutral in NEUTRAL.items():
            if getattr(self, name) != neutral and name not in self.family.fields:
                raise ConfigError(
                    f"{name} is not supported by {self.model_type} models",
                    got=getattr(self, name),
                    fix=f"Set model_type to {' or '.join(families_with(name))}, or leave it out.",
                )
        if self.attn_logit_softcapping is not None and self.family.has_sinks:
            raise ConfigError(
                "attn_logit_softcapping is not supported together with attention sinks",
                got=self.attn_logit_softcapping,
                fix="Leave it out.",
            )
        if self.max_window_layers and self.sliding_window is None:
            raise ConfigError(
                "max_window_layers needs sliding_window",
                got=self.max_window_layers,
                fix="Set sliding_window, or leave it out.",
            )
        self._check_layer_types()
        self._check_layer_rope()
        self.family.check(self)

    def _check_layer_types(self) -> None:
        if self.layer_types is None:
            self._check_first_layers()
            return
        if len(self.layer_types) != self.num_hidden_layers:
            raise ConfigError(
                f"layer_types must name the attention of each of the {self.num_hidden_layers} layers",
                got=f"{len(self.layer_types)} names",
            )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ConfigError(
                "layer_types with sliding_attention needs sliding_window", fix="Set sliding_window."
            )
        if self.max_window_layers:
            raise ConfigError(
                "max_window_layers and layer_types both say which layers have a window",
                got=self.max_window_layers,
                fix="Leave one of them out.",
            )

    def _check_layer_rope(self) -> None:
        bases = self.layer_rope_theta
        if bases is not None and len(bases) != self.num_hidden_layers:
            raise ConfigError(
                f"layer_rope_theta must have a number for each of the {self.num_hidden_layers} layers",
                got=f"{len(bases)} numbers",
            )
        for base in bases or ():
            if not 0 <= base < inf:
                raise ConfigError("layer_rope_theta must have positive numbers, or 0", got=base)
        if self.rope_scaling is not None and self.rope_scaling.llama_4_scaling_beta is not None:
            if not self.family.scales_queries:
                raise ConfigError(
                    f"rope_scaling.llama_4_scaling_beta is not supported by {self.model_type} models",
                    got=self.rope_scaling.llama_4_scaling_beta,
                    fix="Set model_type to ministral3, or leave it out.",
                )
            assert self.scaled_layers is None, "all layers have one rule"
        if self.scaled_layers is not None and self.rope_scaling is None:
            raise ConfigError(
                "scaled_layers needs rope_scaling", got=self.scaled_layers, fix="Set rope_scaling."
            )
        if self.rope_scaling is not None:
            self._check_frequencies(self.rope_scaling)

    def _check_frequencies(self, scaling: RopeScaling) -> None:
        frequencies = self.rotated_dims // 2
        if scaling.rope_type in ("dynamic", "ntk_alpha") and frequencies == 1:
            raise ConfigError(
                f"rope_scaling of {scaling.rope_type} needs more than 2 rotated dimensions", got=2
            )
        for rule in (attention.rope for attention in self.attentions):
            if rule.scaling is not None and rule.scaling.rope_type == "yarn" and rule.theta <= 1:
                raise ConfigError("rope_scaling of yarn needs a rope_theta above 1", got=rule.theta)
        for name in ("short_factor", "long_factor"):
            divisors = getattr(scaling, name)
            if divisors is not None and len(divisors) != frequencies:
                raise ConfigError(
                    f"rope_scaling.{name} must have a number for each of the {frequencies} frequencies",
                    got=f"{len(divisors)} numbers",
                )

    def _check_first_layers(self) -> None:
        if not 0 <= self.max_window_layers <= self.num_hidden_layers:
            raise ConfigError(
                f"max_window_layers must be from 0 to num_hidden_layers {self.num_hidden_layers}",
                got=self.max_window_layers,
                fix="Give the number of first layers without a window.",
            )

    @property
    def family(self) -> Family:
        """Features of this family."""
        family: Family = FAMILY[self.model_type]
        return family

    @property
    def attention_biases(self) -> tuple[str, ...]:
        """Attention projections with a bias, of query, key, value and output."""
        has_bias = {"never": False, "always": True, "chosen": self.attention_bias}[self.family.biases]
        has_output = has_bias if self.attention_out_bias is None else self.attention_out_bias
        return tuple(name for name in self.family.biased if (has_output if name == "output" else has_bias))

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """Kind of each layer."""
        return _layers_of(self)

    @property
    def attentions(self) -> tuple[AttentionKind, ...]:
        """Attention of each layer that has one, in order: the layers of the KV cache."""
        return tuple(kind.attention for kind in self.layers if kind.attention is not None)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each of `attentions` in tokens; None: the whole context."""
        return tuple(attention.window for attention in self.attentions)

    @property
    def key_value_heads(self) -> int:
        """Key-value heads, with the default applied."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def size_of_head(self) -> int:
        """`head_dim`, with the default applied."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def rotated_dims(self) -> int:
        """Dimensions of a head that rotary embedding turns, an even number."""
        return int(self.size_of_head * self.partial_rotary_factor)

    @property
    def context(self) -> int:
        """Context in tokens: `max_position_embeddings`, or the context that yarn extends it to."""
        scaling = self.rope_scaling
        if scaling is None or scaling.rope_type != "yarn":
            return self.max_position_embeddings
        assert scaling.original_max_position_embeddings is not None, scaling
        stretched = int(scaling.factor * scaling.original_max_position_embeddings)
        return max(self.max_position_embeddings, stretched)

    @property
    def attention_scale(self) -> float:
        """Factor on the attention scores."""
        return self.size_of_head**-0.5 if self.attention_multiplier is None else self.attention_multiplier

    @property
    def embedding_factor(self) -> float:
        """Factor on the embeddings; rounded to their dtype if the family says so."""
        return math.sqrt(self.hidden_size) if self.family.scales_embeddings else self.embedding_multiplier

    def linear_shapes(self, kind: LayerKind) -> dict[str, tuple[int, int]]:
        """Return outputs and inputs of each linear layer of a block by name: "attention.query"."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query = self.num_attention_heads * self.size_of_head
        key_value = self.key_value_heads * self.size_of_head
        shapes: dict[str, tuple[int, int]] = {}
        if kind.attention is not None:
            shapes |= {"attention.query": (query, hidden), "attention.key": (key_value, hidden)}
            shapes |= {"attention.value": (key_value, hidden), "attention.output": (hidden, query)}
        if kind.feed_forward is not None:
            shapes |= {"mlp.gate": (inner, hidden)} if self.family.has_gate else {}
            shapes |= {"mlp.up": (inner, hidden), "mlp.down": (hidden, inner)}
        return shapes

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each linear layer of the blocks, by name, in model order."""
        return {
            f"layers.{layer}.{name}": shape
            for layer, kind in enumerate(self.layers)
            for name, shape in self.linear_shapes(kind).items()
        }

    def block_shapes(self, kind: LayerKind) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a block's parameters by name, in model order: "attention.query.weight"."""
        hidden, linear, norms = (self.hidden_size,), self.linear_shapes(kind), self.block_norms(kind)
        with_bias = {"mlp.gate", "mlp.up", "mlp.down"} if self.mlp_bias else set()
        with_bias |= {f"attention.{name}" for name in self.attention_biases}
        shapes: dict[str, tuple[int, ...]] = {}
        for part in kind.parts:
            if f"{part}_norm" in norms:
                shapes[f"{part}_norm.weight"] = hidden
            if part == "attention" and self.family.has_sinks:
                shapes["attention.sinks"] = (self.num_attention_heads,)
            for name in (name for name in linear if name.startswith(f"{part}.")):
                shapes[f"{name}.weight"] = linear[name]
                if name in with_bias:
                    shapes[f"{name}.bias"] = linear[name][:1]
            for name in ("query", "key") if part == "attention" and self.family.qk_norm else ():
                size = linear[f"attention.{name}"][0] if self.family.qk_norm == "whole" else self.size_of_head
                shapes[f"attention.{name}_norm.weight"] = (size,)
            if f"{part}_out_norm" in norms:
                shapes[f"{part}_out_norm.weight"] = hidden
        return shapes

    def block_norms(self, kind: LayerKind) -> tuple[str, ...]:
        """Return the norms of a block, by name in the order of a forward pass; those of queries and keys left
        out."""
        before, after = self.family.norm_placement != "post", self.family.norm_placement != "pre"
        names = ("_norm",) * before + ("_out_norm",) * after
        return tuple(part + name for part in kind.parts for name in names)

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the model's parameters by name, in model order."""
        matrix, layers = (self.vocab_size, self.hidden_size), self.layers
        blocks = {kind: self.block_shapes(kind) for kind in set(layers)}
        return {
            "embed.weight": matrix,
            **{
                f"layers.{layer}.{name}": shape
                for layer, kind in enumerate(layers)
                for name, shape in blocks[kind].items()
            },
            "norm.weight": (self.hidden_size,),
            **({} if self.tie_word_embeddings else {"unembed.weight": matrix}),
        }

    @property
    def stored_rows(self) -> dict[str, StoredRows]:
        """Where a model folder of Hugging Face stores each parameter, by name, in model order."""
        return self.family.tensors.rows_of(self)

    @property
    def num_parameters(self) -> int:
        """Number of trainable numbers; a tied embedding counts once."""
        matrices = 1 if self.tie_word_embeddings else 2
        ends = matrices * self.vocab_size * self.hidden_size + self.hidden_size
        return self.parameters_of(self.layers) + ends

    def parameters_of(self, layers: Iterable[LayerKind]) -> int:
        """Return the number of trainable numbers of some blocks."""
        return sum(count * _parameters_of(self, kind) for kind, count in Counter(layers).items())

    def flops_per_token(self, seq_len: int) -> float:
        """Return the floating-point operations of training per token, forward and backward.

        The convention of model FLOPs utilisation: 6 per multiplied parameter, and 12 x width x keys for the
        attention of each layer, without the causal half (Chowdhery et al., PaLM, arXiv:2204.02311, appendix
        B). A window limits the keys. The input embedding is a lookup, not a product.

        Args:
            seq_len: row length in tokens: the number of keys per query.
        """
        keys = sum(seq_len if window is None else min(seq_len, window) for window in self.windows)
        looked_up = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        width = self.num_attention_heads * self.size_of_head
        return 6.0 * (self.num_parameters - looked_up) + 12.0 * width * keys


@lru_cache(maxsize=64)
def _layers_of(config: DecoderConfig) -> tuple[LayerKind, ...]:
    count, whole, window = config.num_hidden_layers, config.max_window_layers, config.sliding_window
    windows = (None,) * whole + (window,) * (count - whole)
    if config.layer_types is not None:
        windows = tuple(None if kind == "full_attention" else window for kind in config.layer_types)
    pairs = tuple(zip(windows, config.layer_rope_theta or (config.rope_theta,) * count, strict=True))
    kinds = {pair: LayerKind(AttentionKind(pair[0], _rope_of(config, *pair))) for pair in set(pairs)}
    return tuple(kinds[pair] for pair in pairs)


@lru_cache(maxsize=256)  # a search asks for each of many thousand plans
def _parameters_of(config: DecoderConfig, kind: LayerKind) -> int:
    return sum(map(prod, config.block_shapes(kind).values()))


def _rope_of(config: DecoderConfig, window: int | None, base: float) -> RopeRule:
    if not base:
        return NO_POSITIONS
    kind = "full_attention" if window is None else "sliding_attention"
    scaling = config.rope_scaling if config.scaled_layers in (None, kind) else None
    return RopeRule(theta=base, scaling=scaling, rotated=config.partial_rotary_factor)


NO_POSITIONS = RopeRule(theta=1.0, scaling=None, rotated=0.0)
"""Rotary embedding of a layer without positions: cosines of 1, sines of 0."""


def check_ceilings(values: Mapping[str, object]) -> None:
    """Raise ConfigError for a size of a config, by the name of its field, that is above all models'."""
    for name, most in _MAX.items():
        value = values.get(name)
        if isinstance(value, int) and value > most:
            raise ConfigError(f"{name} can be at most {most:,}", got=value)


_MAX = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**23,
    "num_hidden_layers": 2000,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "max_position_embeddings": 2**40,
    "sliding_window": 2**40,
}
"""Ceilings, far above all models. A config may be untrusted: blocks are built before weights are read, and
the bytes of a matrix have to fit into 64 bits."""

_POSITIVE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_theta", "rms_norm_eps",
    "sliding_window", "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",
    "attn_logit_softcapping", "final_logit_softcapping",
)  # fmt: skip
