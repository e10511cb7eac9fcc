"""OLMo 2 (Ai2, arXiv:2501.00656): norms after attention and feed-forward, and of whole queries and keys."""

from penstock.models.family.base import DEFAULTS, Family
from penstock.models.family.tensors import TensorLayout

FAMILY = Family(
    architecture="Olmo2ForCausalLM",
    own_keys=frozenset({"attention_bias"}),
    defaults={**DEFAULTS, "rms_norm_eps": 1e-5, "attention_bias": False},
    biases="chosen",
    norm_placement="post",
    qk_norm="whole",
    tensors=TensorLayout(names={"attention_out_norm": "post_attention_layernorm"}),
)
