"""Qwen 2 and 2.5 (arXiv:2407.10671, arXiv:2412.15115): biases in queries, keys and values."""

from typing import Any

from penstock.core.errors import ConfigError
from penstock.models.family.base import DEFAULTS, SIZES_OF_LLAMA, Family, Raw
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

_CHUNKS = "dual_chunk_attention_config"
_CHUNK_KEYS = {"chunk_size", "local_size", "original_max_position_embeddings"}


def _read(raw: Raw) -> Raw:
    return {**read_first_whole(raw), **_context(raw)}


def _context(raw: Raw) -> dict[str, Any]:  # Any: a field of DecoderConfig
    """Return the context of Qwen2.5-1M: texts of one chunk, for which attention in chunks is attention.

    Positions start again in each chunk of `chunk_size - local_size` tokens (arXiv:2501.15383).
    """
    chunks, context = raw.get(_CHUNKS), raw["max_position_embeddings"]
    if chunks is None:
        return {}
    if not isinstance(chunks, dict) or chunks.keys() != _CHUNK_KEYS or not _are_sizes(chunks):
        raise ConfigError(
            f"{_CHUNKS} must have {', '.join(sorted(_CHUNK_KEYS))}, and nothing else",
            got=chunks,
            fix="Take config.json from where the weights came from.",
        )
    return {"max_position_embeddings": min(context, chunks["chunk_size"] - chunks["local_size"])}


def _are_sizes(chunks: dict[str, Any]) -> bool:  # Any: JSON
    return (
        all(type(size) is int for size in chunks.values()) and 0 < chunks["local_size"] < chunks["chunk_size"]
    )


QWEN_SIZES = {**SIZES_OF_LLAMA, "vocab_size": 151_936, "intermediate_size": 22_016}

FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    limits="texts of Qwen2.5-1M beyond 253,952 tokens",
    own_keys=QWEN_KEYS | {_CHUNKS},
    defaults=QWEN_DEFAULTS,
    sizes=QWEN_SIZES,
    read=_read,
    write=write_first_whole,
    biases="always",
    biased=("query", "key", "value"),
)
