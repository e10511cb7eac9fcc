"""Seed-OSS 36B (ByteDance, 2025): Llama whose output projection has a bias of its own choice."""

from penstock.models.family.base import BOOKKEEPING, DEFAULTS, Family

FAMILY = Family(
    architecture="SeedOssForCausalLM",
    own_keys=frozenset({"attention_bias", "attention_out_bias", "mlp_bias"}),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524_288,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
    },
    ignored=BOOKKEEPING | {"residual_dropout"},
    biases="chosen",
)
