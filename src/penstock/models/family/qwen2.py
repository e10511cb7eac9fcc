"""Qwen 2 and 2.5 (arXiv:2407.10671, arXiv:2412.15115): biases in queries, keys and values."""

from penstock.models.family.base import DEFAULTS, Family
from penstock.models.family.windows import read_first_whole, write_first_whole

QWEN_DEFAULTS = {
    **DEFAULTS,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
QWEN_KEYS = frozenset({"sliding_window", "max_window_layers", "use_sliding_window", "layer_types"})

FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    own_keys=QWEN_KEYS,
    defaults=QWEN_DEFAULTS,
    read=read_first_whole,
    write=write_first_whole,
    biases="always",
    biased=("query", "key", "value"),
)
