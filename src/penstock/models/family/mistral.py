"""Mistral 7B, NeMo and Small (Jiang et al., arXiv:2310.06825): one window for all layers, or none."""

from penstock.models.family.base import DEFAULTS, SIZES_OF_LLAMA, Family

FAMILY = Family(
    architecture="MistralForCausalLM",
    own_keys=frozenset({"sliding_window"}),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    sizes={**SIZES_OF_LLAMA, "intermediate_size": 14_336},
)
