"""Model families as data: config fields and block features of each; no torch.

All families are one network (models/llama): blocks of attention and SwiGLU, each with a norm before. They
differ in biases, norms of queries and keys, attention windows, and a few factors. A family that differs in no
more than that is a row here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

ModelType = Literal["llama", "granite", "mistral", "qwen2", "qwen3"]
"""Supported values of model_type."""

BiasRule = Literal["chosen", "never", "query_key_value"]
"""Biases of the attention projections: all four if `attention_bias` is set, none, or always three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Features of one family."""

    architecture: str
    """Class name in transformers."""
    fields: frozenset[str] = frozenset()
    """Fields of NEUTRAL that the family supports."""
    attention_bias: BiasRule = "never"
    has_query_key_norm: bool = False
    """True if queries and keys are normalised per head before rotary embedding."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Defaults of transformers for absent keys, if different from LlamaConfig's."""


NEUTRAL: Mapping[str, object] = {
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "max_window_layers": 0,
    "embedding_multiplier": 1.0,
    "attention_multiplier": None,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
"""Fields that only some families support, with their neutral values."""

_WINDOWED_LAYERS = frozenset({"sliding_window", "max_window_layers"})

FAMILY: Mapping[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        fields=frozenset({"attention_bias", "mlp_bias"}),
        attention_bias="chosen",
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        fields=frozenset(NEUTRAL) - _WINDOWED_LAYERS,
        attention_bias="chosen",
        defaults={"attention_multiplier": 1.0},
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        fields=frozenset({"sliding_window"}),
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        fields=_WINDOWED_LAYERS,
        attention_bias="query_key_value",
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32_768},
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        fields=_WINDOWED_LAYERS | {"attention_bias"},
        attention_bias="chosen",
        has_query_key_norm=True,
        defaults={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768},
    ),
}

assert set(FAMILY) == set(get_args(ModelType)), "every family has a row"


def families_with(name: str) -> list[str]:
    """Return the families that support a field of NEUTRAL.

    >>> families_with("max_window_layers")
    ['qwen2', 'qwen3']
    """
    return [model_type for model_type, family in FAMILY.items() if name in family.fields]


def supported_families() -> str:
    """Return the supported families as a sentence, for error messages."""
    return f"Supported: {', '.join(sorted(get_args(ModelType)))}."
