"""Qwen 3 (arXiv:2505.09388): queries and keys are normalised."""

from penstock.models.family.base import Family
from penstock.models.family.qwen2 import QWEN_DEFAULTS, QWEN_KEYS, QWEN_SIZES
from penstock.models.family.windows import read_first_whole, write_first_whole

FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    own_keys=QWEN_KEYS | {"attention_bias"},
    defaults={**QWEN_DEFAULTS, "head_dim": 128, "attention_bias": False},
    sizes=QWEN_SIZES,
    read=read_first_whole,
    write=write_first_whole,
    biases="chosen",
    qk_norm="head",
)
