"""Families of decoders as data: what `config.json` may say of each, and what its blocks have; no torch.

All of them are one network (models/llama): a block of attention and SwiGLU, each normalised before. They
differ in biases, in norms of queries and keys, in which layers see how far back, and in a few factors. A
family that differs in no more than that is a row here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

ModelType = Literal["llama", "granite", "mistral", "qwen2", "qwen3"]
"""The families, by the name that `config.json` gives them."""

BiasRule = Literal["chosen", "never", "query_key_value"]
"""Biases of the attention projections: all four if `attention_bias` says so, none, or always three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What one family has."""

    architecture: str
    """The class of transformers."""
    fields: frozenset[str] = frozenset()
    """Those of NEUTRAL that mean something in it."""
    attention_bias: BiasRule = "never"
    has_query_key_norm: bool = False
    """Queries and keys are normalised, each head by itself, before they are rotated."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """What transformers takes for an absent key, where that is not LlamaConfig's default."""


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
"""Fields that only some families have, each with the value that changes nothing."""

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
    """Return the families in which a field of NEUTRAL means something.

    >>> families_with("max_window_layers")
    ['qwen2', 'qwen3']
    """
    return [model_type for model_type, family in FAMILY.items() if name in family.fields]
