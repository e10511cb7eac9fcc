"""Gemma 1 (arXiv:2403.08295): norms whose weights are stored less 1, GELU gates, scaled embeddings."""

from penstock.core.errors import ModelError
from penstock.models.family.base import DEFAULTS, Family, Raw

GELU = "gelu_pytorch_tanh"


def _read(raw: Raw) -> Raw:
    if raw.get("hidden_activation") not in (None, GELU):  # what "gelu" was meant to be in transformers 4
        raise ModelError(
            f"hidden_activation must be {GELU}",
            got=raw["hidden_activation"],
            fix="Penstock computes Gemma with that activation only.",
        )
    return {}


FAMILY = Family(
    architecture="GemmaForCausalLM",
    own_keys=frozenset({"attention_bias", "hidden_activation"}),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": GELU,
        "use_bidirectional_attention": None,
    },
    read=_read,
    biases="chosen",
    has_zero_centered_norms=True,
    activation="gelu_tanh",
    activation_names=(GELU, "gelu"),
    scales_embeddings=True,
)
