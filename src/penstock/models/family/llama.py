"""Llama 1 to 3 (Touvron et al., arXiv:2302.13971; Grattafiori et al., arXiv:2407.21783)."""

from penstock.models.family.base import BOOKKEEPING, DEFAULTS, SIZES_OF_LLAMA, Family

FAMILY = Family(
    architecture="LlamaForCausalLM",
    own_keys=frozenset({"attention_bias", "mlp_bias"}),
    defaults={**DEFAULTS, "attention_bias": False, "mlp_bias": False, "head_dim": None},
    sizes=SIZES_OF_LLAMA,
    ignored=BOOKKEEPING
    | {"perceiver_config", "pixel_shuffle_factor"},  # of images, in the text_config of SmolVLM
    biases="chosen",
)
