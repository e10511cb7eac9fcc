"""Granite 3 and 4.1: Llama with four factors. The output matrix is usually tied."""

from penstock.models.family.base import DEFAULTS, SIZES_OF_LLAMA, Family

FACTORS = frozenset({"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"})
"""Factors of every Granite, keys of config.json and fields alike."""

FAMILY = Family(
    architecture="GraniteForCausalLM",
    own_keys=FACTORS | {"attention_bias", "mlp_bias"},
    defaults={**DEFAULTS, **dict.fromkeys(FACTORS, 1.0), "attention_bias": False, "mlp_bias": False},
    sizes=SIZES_OF_LLAMA,
    biases="chosen",
)
