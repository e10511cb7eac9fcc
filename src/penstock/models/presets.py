"""Presets: published model shapes by name, for `model.preset`, as values of a DecoderConfig; no torch.

Tests compare the parameter count of each with the published one, as the author remembers it, to the digit,
and with transformers' model of the same shape. A count cannot verify `rope_theta`, `rms_norm_eps`, the
context (`max_position_embeddings`), the factors of Granite and the scaling of Llama 3.1 and 3.2: those of
Qwen and the factors of granite3-8b were compared with copies of the files, the others are from memory. To
continue a checkpoint, use its own `config.json`; a preset is for training the shape from scratch.

`granite-7b` is IBM's first Granite, with the architecture of Llama 2. `t5-11b-decoder` is not a published
model: a decoder with T5-11B's parameter count and vocabulary, in the proportions of Llama.
"""

import re
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ConfigError, nearest

Values = dict[str, Any]  # Any: config values, validated by DecoderConfig


def _shape(size: str) -> Values:
    """Parse hidden / intermediate / layers / heads / key-value heads, in the order of papers."""
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    )  # fmt: skip
    return dict(zip(names, map(int, size.split("/")), strict=True))


def _table(shared: Values, sizes: Mapping[str, str | tuple[str, Values]]) -> dict[str, Values]:
    """Return the presets of one release, from shared values, sizes and individual values."""
    found = {}
    for name, size in sizes.items():
        text, own = (size, {}) if isinstance(size, str) else size
        found[name] = {**shared, **_shape(text), **own}
    return found


def _llama3_scaling(factor: float) -> Values:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_TIED = {"tie_word_embeddings": True}
_LLAMA_2 = {"vocab_size": 32_000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
_LLAMA_3 = {
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
}
_LLAMA_31 = {**_LLAMA_3, "max_position_embeddings": 131_072, "rope_scaling": _llama3_scaling(8.0)}
_LLAMA_32 = {**_LLAMA_31, **_TIED, "rope_scaling": _llama3_scaling(32.0)}
_GRANITE_3 = {
    "model_type": "granite",
    "vocab_size": 49_155,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    **_TIED,
}
_MISTRAL = {"model_type": "mistral", "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5}
_QWEN_25 = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}
_QWEN_25_LARGE = {**_QWEN_25, "vocab_size": 152_064, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
_QWEN_3 = {**_QWEN_25, "model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 40_960}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    **_table(
        _LLAMA_2,
        {
            "llama2-7b": "4096/11008/32/32/32",
            "llama2-13b": "5120/13824/40/40/40",
            "llama2-70b": "8192/28672/80/64/8",
            "granite-7b": ("4096/11008/32/32/32", {"rms_norm_eps": 1e-6}),
            "t5-11b-decoder": ("4096/16384/40/32/32", {"vocab_size": 32_128}),
        },
    ),
    **_table(_LLAMA_3, {"llama3-8b": "4096/14336/32/32/8", "llama3-70b": "8192/28672/80/64/8"}),
    **_table(
        _LLAMA_31,
        {
            "llama3.1-8b": "4096/14336/32/32/8",
            "llama3.1-70b": "8192/28672/80/64/8",
            "llama3.1-405b": "16384/53248/126/128/8",
        },
    ),
    **_table(
        _LLAMA_32,
        {
            "llama3.2-1b": ("2048/8192/16/32/8", {"head_dim": 64}),
            "llama3.2-3b": ("3072/8192/28/24/8", {"head_dim": 128}),
        },
    ),
    **_table(
        _GRANITE_3,
        {
            "granite3-2b": ("2048/8192/40/32/8", {"attention_multiplier": 1 / 64, "logits_scaling": 8.0}),
            "granite3-8b": ("4096/12800/40/32/8", {"attention_multiplier": 1 / 128, "logits_scaling": 16.0}),
        },
    ),
    **_table(
        _MISTRAL,
        {
            "mistral-7b-v0.1": ("4096/14336/32/32/8", {"vocab_size": 32_000, "sliding_window": 4096}),
            "mistral-7b-v0.3": ("4096/14336/32/32/8", {"vocab_size": 32_768, "rope_theta": 1e6}),
            "mistral-nemo": (
                "5120/14336/40/32/8",
                {
                    "vocab_size": 131_072,
                    "head_dim": 128,
                    "rope_theta": 1e6,
                    "max_position_embeddings": 131_072,
                },
            ),
        },
    ),
    **_table(
        _QWEN_25,
        {
            "qwen2.5-0.5b": ("896/4864/24/14/2", _TIED),
            "qwen2.5-1.5b": ("1536/8960/28/12/2", _TIED),
            "qwen2.5-3b": ("2048/11008/36/16/2", _TIED),
        },
    ),
    **_table(
        _QWEN_25_LARGE,
        {
            "qwen2.5-7b": ("3584/18944/28/28/4", {"rms_norm_eps": 1e-6}),
            "qwen2.5-14b": "5120/13824/48/40/8",
            "qwen2.5-32b": "5120/27648/64/40/8",
            "qwen2.5-72b": "8192/29568/80/64/8",
        },
    ),
    **_table(
        _QWEN_3,
        {
            "qwen3-0.6b": ("1024/3072/28/16/8", _TIED),
            "qwen3-1.7b": ("2048/6144/28/16/8", _TIED),
            "qwen3-4b": ("2560/9728/36/32/8", _TIED),
            "qwen3-8b": "4096/12288/36/32/8",
            "qwen3-14b": "5120/17408/40/40/8",
            "qwen3-32b": "5120/25600/64/64/8",
        },
    ),
}
"""Name -> fields of DecoderConfig; other fields have their defaults."""


def expanded(model: Mapping[str, Any]) -> Values:
    """Return a recipe's model section with its preset expanded under its own keys.

    A key with the value "none" removes the preset's value, because TOML has no null.

    Raises:
        ConfigError: unknown preset.

    >>> expanded({"preset": "qwen3-4b", "num_hidden_layers": 2})["num_hidden_layers"]
    2
    """
    own = dict(model)
    if "preset" not in own:
        return own
    name = own.pop("preset")
    if name not in PRESETS:
        raise ConfigError("Unknown model.preset", got=name, fix=nearest(str(name), list(PRESETS)))
    return {key: value for key, value in {**PRESETS[name], **own}.items() if value != "none"}


def preset_named(folder: str) -> str | None:
    """Return the preset that the name of a model's folder begins with; None if there is none.

    >>> preset_named("Qwen3-0.6B-Base"), preset_named("Llama-3.1-70B-Instruct"), preset_named("mine")
    ('qwen3-0.6b', 'llama3.1-70b', None)
    """
    name = _letters(folder)
    fitting = (preset for preset in PRESETS if re.fullmatch(f"{re.escape(_letters(preset))}[a-z]*", name))
    return max(fitting, key=len, default=None)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9.]|(?<![0-9])\.", "", name.lower())
