"""GLM-4 of 2025 (9B and 32B, 0414): GLM with norms before and after attention and feed-forward."""

from dataclasses import replace

from penstock.models.family.glm import FAMILY as GLM

FAMILY = replace(
    GLM,
    architecture="Glm4ForCausalLM",
    norm_placement="sandwich",
    tensors=replace(
        GLM.tensors,
        names={"attention_out_norm": "post_self_attn_layernorm", "mlp_out_norm": "post_mlp_layernorm"},
    ),
)
