"""Helium 2B of Kyutai: Llama with interleaved rotary embedding."""

from penstock.models.family.base import DEFAULTS, Family
from penstock.models.family.tensors import TensorLayout

FAMILY = Family(
    architecture="HeliumForCausalLM",
    own_keys=frozenset({"attention_bias", "mlp_bias"}),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 20,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8,
        "attention_bias": False,
        "mlp_bias": False,
    },
    default_rope={"rope_theta": 100_000.0},
    biases="chosen",
    biased=("query", "key", "value"),
    tensors=TensorLayout(has_interleaved_rope=True),
)
