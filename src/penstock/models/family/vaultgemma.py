"""VaultGemma 1B (arXiv:2510.15001): Gemma 2 without norms after layers, trained with differential privacy."""

from dataclasses import replace

from penstock.models.family.gemma2 import FAMILY as GEMMA_2
from penstock.models.family.tensors import TensorLayout

FAMILY = replace(
    GEMMA_2,
    architecture="VaultGemmaForCausalLM",
    defaults={k: v for k, v in GEMMA_2.defaults.items() if k != "use_bidirectional_attention"},
    norm_placement="pre",
    tensors=TensorLayout(names={"mlp_norm": "pre_feedforward_layernorm"}),
)
