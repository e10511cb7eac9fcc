"""GLM-4 9B of 2024: half of each head is rotated, interleaved; gate and up are fused."""

from penstock.models.family.base import DEFAULTS, Family
from penstock.models.family.tensors import TensorLayout

FAMILY = Family(
    architecture="GlmForCausalLM",
    own_keys=frozenset({"attention_bias"}),
    settings=frozenset({"partial_rotary_factor"}),
    rotates_part=True,
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
    },
    default_rope={"partial_rotary_factor": 0.5},
    biases="chosen",
    biased=("query", "key", "value"),
    tensors=TensorLayout(has_interleaved_rope=True, fused={"mlp.gate_up_proj": ("mlp.gate", "mlp.up")}),
)
