"""Llama 1 to 3 (Touvron et al., arXiv:2302.13971; Grattafiori et al., arXiv:2407.21783)."""

from penstock.models.family.base import DEFAULTS, SIZES_OF_LLAMA, Family

FAMILY = Family(
    architecture="LlamaForCausalLM",
    own_keys=frozenset({"attention_bias", "mlp_bias"}),
    defaults={**DEFAULTS, "attention_bias": False, "mlp_bias": False, "head_dim": None},
    sizes=SIZES_OF_LLAMA,
    biases="chosen",
)
