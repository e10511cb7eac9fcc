"""Presets: published model shapes by name, for `model.preset`, as values of a DecoderConfig; no torch.

Tests compare the parameter count of each with the published one, as the author remembers it, to the digit,
and with transformers' model of the same shape. A count cannot verify `rope_theta`, `rms_norm_eps`, the
context (`max_position_embeddings`), the factors of Granite and the scaling of Llama 3.1 and 3.2: those of
Qwen and the factors of granite3-8b were compared with copies of the files. `SOURCES` says where those of
newer families were read, and tests open copies of their files; the others are from memory. To continue a
checkpoint, use its own `config.json`; a preset is for training the shape from scratch.

Left out, because these values were found nowhere: the context of Granite 4.1 30B, all of Granite 4.2 3B and
8B, the context and the growth of queries of Ministral 3 14B, the epsilon of HunYuan 4B, the context and the
kinds of layers of VaultGemma. Defaults of their classes in transformers are not the published models.

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


def _windows(*, layers: int, every: int) -> tuple[str, ...]:
    """Return kinds of layers of which each `every`-th sees the whole context."""
    return tuple("sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers))


def _gemma2(*, layers: int) -> Values:
    return {
        "model_type": "gemma2",
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "layer_types": ("sliding_attention", "full_attention") * (layers // 2),
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }


def _gemma3(*, layers: int, window: int) -> Values:
    kinds = _windows(layers=layers, every=6)
    return {
        "layer_types": kinds,
        "sliding_window": window,
        "layer_rope_theta": tuple(1e4 if kind == "sliding_attention" else 1e6 for kind in kinds),
    }


def _llama3_scaling(factor: float) -> Values:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _yarn(factor: float, original: int, **own: float) -> Values:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **own}


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

_GRANITE_4 = {
    "model_type": "granitemoehybrid",
    "vocab_size": 100_352,
    "max_position_embeddings": 131_072,
    "rope_theta": 1e7,
    "rms_norm_eps": 1e-5,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 1 / 64,
    "logits_scaling": 10.0,
    **_TIED,
}
_GRANITE_41 = {**_GRANITE_4, "model_type": "granite"}
_GEMMA = {
    "model_type": "gemma",
    "vocab_size": 256_000,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    **_TIED,
}
_GEMMA_3 = {
    "model_type": "gemma3_text",
    "vocab_size": 262_144,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
    **_TIED,
}
_GEMMA_3_LARGE = {
    **_GEMMA_3,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "scaled_layers": "full_attention",
}
_OLMO_2 = {
    "model_type": "olmo2",
    "vocab_size": 100_352,
    "max_position_embeddings": 4096,
    "rope_theta": 500_000.0,
}
_OLMO_3 = {
    **_OLMO_2,
    "model_type": "olmo3",
    "vocab_size": 100_278,
    "max_position_embeddings": 65_536,
    "rope_scaling": _yarn(8.0, 8192, attention_factor=1.2079441541679836, beta_fast=32.0, beta_slow=1.0),
    "scaled_layers": "full_attention",
    "sliding_window": 4096,
}
_EXAONE_4 = {
    "model_type": "exaone4",
    "vocab_size": 102_400,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "rope_scaling": _llama3_scaling(16.0),
}
_GLM_4_0414 = {
    "model_type": "glm4",
    "vocab_size": 151_552,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
}
_HUNYUAN = {
    "model_type": "hunyuan_v1_dense",
    "vocab_size": 120_818,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {"rope_type": "ntk_alpha", "factor": 1.0, "alpha": 1000.0},
    **_TIED,
}
_PHI = {"model_type": "phi3", "rms_norm_eps": 1e-5}


def _longrope(short: tuple[float, ...], long: tuple[float, ...]) -> Values:
    """Return the rule of Phi, whose context grew from 4,096 to 131,072 tokens."""
    return {
        "rope_type": "longrope",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "short_factor": short,
        "long_factor": long,
    }


_PHI_35_LONGROPE = _longrope(
    (
        1.0, 1.02, 1.03, 1.03, 1.05, 1.05, 1.05, 1.05, 1.05, 1.07, 1.1, 1.11, 1.16, 1.16, 1.17, 1.29, 1.34,
        1.68, 1.79, 1.82, 1.85, 1.88, 1.91, 1.94, 1.99, 2.02, 2.02, 2.02, 2.02, 2.02, 2.02, 2.03, 2.03, 2.03,
        2.03, 2.03, 2.03, 2.03, 2.03, 2.03, 2.08, 2.09, 2.19, 2.22, 2.59, 2.73, 2.75, 2.84,
    ),
    (
        1.08, 1.11, 1.14, 1.34, 1.59, 1.6, 1.62, 2.62, 3.23, 3.23, 4.79, 7.4, 7.7, 9.09, 12.2, 17.67, 24.46,
        28.57, 30.42, 30.84, 32.59, 32.93, 42.32, 44.96, 50.34, 50.45, 57.55, 57.93, 58.21, 60.14, 62.61,
        62.62, 62.71, 63.14, 63.14, 63.77, 63.93, 63.96, 63.97, 64.03, 64.07, 64.08, 64.12, 64.41, 64.48,
        64.51, 64.53, 64.84,
    ),
)  # fmt: skip
_PHI_4_MINI_LONGROPE = _longrope(
    (1.0,) * 48,
    (
        1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
        2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845,
        5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129,
        13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418,
        28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28,
        33.49, 33.5, 44.16, 47.77,
    ),
)  # fmt: skip
_MINISTRAL_3 = {
    "model_type": "ministral3",
    "vocab_size": 131_072,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
}


def _ministral3_scaling(factor: float, original: int) -> Values:
    betas = {"beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.1}
    return _yarn(factor, original, mscale=1.0, mscale_all_dim=1.0, **betas)


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
    **_table(
        _GRANITE_4,
        {
            "granite4.0-350m": (
                "1024/2048/28/16/4",
                {"max_position_embeddings": 32_768, "residual_multiplier": 0.263, "logits_scaling": 4.0},
            ),
            "granite4.0-1b": ("2048/4096/40/16/4", {"attention_multiplier": 1 / 128, "logits_scaling": 8.0}),
            "granite4.0-micro": "2560/8192/40/40/8",
        },
    ),
    **_table(
        _GRANITE_41,
        {
            "granite4.1-3b": "2560/8192/40/40/8",
            "granite4.1-8b": (
                "4096/12800/40/32/8",
                {"attention_multiplier": 1 / 128, "logits_scaling": 16.0},
            ),
            "granite4.2-30b": (
                "4096/32768/64/32/8",
                {
                    "rope_theta": 5e7,
                    "embedding_multiplier": 1.0,
                    "residual_multiplier": 1.0,
                    "attention_multiplier": 1 / 128,
                    "logits_scaling": 1.0,
                    "tie_word_embeddings": False,
                },
            ),
            "granite-swash-2b": (
                "2560/8192/24/20/4",
                {
                    "model_type": "granite_swa",
                    "max_position_embeddings": 8192,
                    "rope_theta": 1e4,
                    "residual_multiplier": 0.28,
                    "attention_multiplier": 1 / 128,
                    "sliding_window": 128,
                    "layer_types": ("full_attention", *("sliding_attention",) * 3) * 6,
                },
            ),
        },
    ),
    **_table(_GEMMA, {"gemma-2b": "2048/16384/18/8/1", "gemma-7b": "3072/24576/28/16/16"}),
    **_table(
        _GEMMA_3,
        {
            "gemma3-270m": ("640/2048/18/4/1", _gemma3(layers=18, window=512)),
            "gemma3-1b": ("1152/6912/26/4/1", _gemma3(layers=26, window=512)),
        },
    ),
    **_table(
        _GEMMA_3_LARGE,
        {
            "gemma3-4b": ("2560/10240/34/8/4", _gemma3(layers=34, window=1024)),
            "gemma3-12b": ("3840/15360/48/16/8", _gemma3(layers=48, window=1024)),
            "gemma3-27b": (
                "5376/21504/62/32/16",
                {**_gemma3(layers=62, window=1024), "head_dim": 128, "attention_multiplier": 168**-0.5},
            ),
        },
    ),
    **_table(
        _OLMO_2,
        {
            "olmo2-1b": "2048/8192/16/16/16",
            "olmo2-7b": "4096/11008/32/32/32",
            "olmo2-13b": "5120/13824/40/40/40",
            "olmo2-32b": "5120/27648/64/40/8",
        },
    ),
    **_table(
        _OLMO_3,
        {
            "olmo3-7b": ("4096/11008/32/32/32", {"layer_types": _windows(layers=32, every=4)}),
            "olmo3-32b": ("5120/27648/64/40/8", {"layer_types": _windows(layers=64, every=4)}),
        },
    ),
    **_table(
        _EXAONE_4,
        {
            "exaone4.0-1.2b": ("2048/4096/30/32/8", {"max_position_embeddings": 65_536, **_TIED}),
            "exaone4.0-32b": (
                "5120/27392/64/40/8",
                {
                    "max_position_embeddings": 131_072,
                    "sliding_window": 4096,
                    "layer_types": _windows(layers=64, every=4),
                    "layer_rope_theta": (1e6, 1e6, 1e6, 0.0) * 16,
                },
            ),
        },
    ),
    **_table(
        _GLM_4_0414,
        {
            "glm4-9b-0414": ("4096/13696/40/32/2", {"attention_bias": True}),
            "glm4-32b-0414": "6144/23040/61/48/2",
        },
    ),
    **_table(
        _HUNYUAN,
        {
            "hunyuan-0.5b": "1024/3584/24/16/8",
            "hunyuan-1.8b": "2048/6144/32/16/4",
            "hunyuan-7b": ("4096/14336/32/32/8", {"vocab_size": 128_167, "max_position_embeddings": 32_768}),
        },
    ),
    **_table(
        _PHI,
        {
            "phi3-mini-4k": (
                "3072/8192/32/32/32",
                {"vocab_size": 32_064, "max_position_embeddings": 4096, "sliding_window": 2047},
            ),
            "phi3.5-mini": (
                "3072/8192/32/32/32",
                {
                    "vocab_size": 32_064,
                    "max_position_embeddings": 131_072,
                    "sliding_window": 262_144,
                    "rope_scaling": _PHI_35_LONGROPE,
                },
            ),
            "phi4": (
                "5120/17920/40/40/10",
                {"vocab_size": 100_352, "max_position_embeddings": 16_384, "rope_theta": 250_000.0},
            ),
            "phi4-mini": (
                "3072/8192/32/24/8",
                {
                    "vocab_size": 200_064,
                    "max_position_embeddings": 131_072,
                    "sliding_window": 262_144,
                    "partial_rotary_factor": 0.75,
                    "rope_scaling": _PHI_4_MINI_LONGROPE,
                    **_TIED,
                },
            ),
        },
    ),
    **_table(
        _MINISTRAL_3,
        {
            "ministral3-3b": (
                "3072/9216/26/32/8",
                {"rope_theta": 1e6, "rope_scaling": _ministral3_scaling(16.0, 16_384), **_TIED},
            ),
            "ministral3-8b": (
                "4096/14336/34/32/8",
                {"rope_theta": 1e6, "rope_scaling": _ministral3_scaling(16.0, 16_384)},
            ),
            "devstral-small2-24b": (
                "5120/32768/40/32/8",
                {"rope_theta": 1e8, "rope_scaling": _ministral3_scaling(48.0, 8192)},
            ),
        },
    ),
    **_table(
        {},
        {
            "mistral-small3.1-24b": (
                "5120/32768/40/32/8",
                {
                    **_MISTRAL,
                    "vocab_size": 131_072,
                    "head_dim": 128,
                    "max_position_embeddings": 131_072,
                    "rope_theta": 1e9,
                },
            ),
            "ministral-8b": (
                "4096/12288/36/32/8",
                {
                    **_MISTRAL,
                    "vocab_size": 131_072,
                    "head_dim": 128,
                    "rope_theta": 1e8,
                    "sliding_window": 32_768,
                },
            ),
            "afm-4.5b": (
                "2560/18432/36/20/4",
                {
                    "model_type": "arcee",
                    "vocab_size": 128_004,
                    "max_position_embeddings": 65_536,
                    "rms_norm_eps": 1e-5,
                    "rope_scaling": _yarn(20.0, 4096),
                },
            ),
            "smollm3-3b": (
                "2048/11008/36/16/4",
                {
                    "model_type": "smollm3",
                    "vocab_size": 128_256,
                    "max_position_embeddings": 65_536,
                    "rope_theta": 5e6,
                    "layer_rope_theta": (5e6, 5e6, 5e6, 0.0) * 9,
                    **_TIED,
                },
            ),
            "seed-oss-36b": (
                "5120/27648/64/80/8",
                {
                    "model_type": "seed_oss",
                    "vocab_size": 155_136,
                    "head_dim": 128,
                    "max_position_embeddings": 524_288,
                    "rope_theta": 1e7,
                    "attention_bias": True,
                    "attention_out_bias": False,
                },
            ),
            "glm4-9b-chat": (
                "4096/13696/40/32/2",
                {
                    "model_type": "glm",
                    "vocab_size": 151_552,
                    "head_dim": 128,
                    "max_position_embeddings": 131_072,
                    "rms_norm_eps": 1.5625e-7,
                    "attention_bias": True,
                    "partial_rotary_factor": 0.5,
                },
            ),
            "cwm": (
                "6144/21504/64/48/8",
                {
                    "model_type": "cwm",
                    "vocab_size": 128_256,
                    "head_dim": 128,
                    "max_position_embeddings": 131_072,
                    "rms_norm_eps": 1e-5,
                    "rope_theta": 1e6,
                    "rope_scaling": {**_llama3_scaling(16.0), "low_freq_factor": 1.0},
                    "sliding_window": 8192,
                    "layer_types": ("full_attention", *("sliding_attention",) * 3) * 16,
                },
            ),
            "gemma2-2b": ("2304/9216/26/8/4", {**_gemma2(layers=26), "head_dim": 256}),
            "gemma2-9b": ("3584/14336/42/16/8", {**_gemma2(layers=42), "head_dim": 256}),
            "gemma2-27b": (
                "4608/36864/46/32/16",
                {**_gemma2(layers=46), "head_dim": 128, "attention_multiplier": 1 / 12},
            ),
            "helium1-preview-2b": (
                "2560/7040/24/20/20",
                {
                    "model_type": "helium",
                    "vocab_size": 48_000,
                    "head_dim": 128,
                    "max_position_embeddings": 4096,
                    "rms_norm_eps": 1e-8,
                    "rope_theta": 1e5,
                },
            ),
            "ernie4.5-0.3b": (
                "1024/3072/18/16/2",
                {
                    "model_type": "ernie4_5",
                    "vocab_size": 103_424,
                    "head_dim": 128,
                    "max_position_embeddings": 131_072,
                    "rms_norm_eps": 1e-5,
                    "rope_theta": 500_000.0,
                    **_TIED,
                },
            ),
        },
    ),
}
"""Name -> fields of DecoderConfig; other fields have their defaults."""

_COPY = "a copy of config.json in a public repository"
_TUNED = "copies of config.json with models that were tuned from it"
SOURCES: Mapping[str, str] = {
    **dict.fromkeys(
        ("granite4.0-350m", "granite4.0-1b"),
        "metadata of IBM's GGUF files; factors also in tests of a public repository; tied, by their size",
    ),
    "granite4.0-micro": "sizes and factors in tests of a public repository, base and epsilon in those of "
    "Granite 4 Vision, which has the same text part",
    "granite4.1-3b": _COPY,
    "granite4.1-8b": "tests of a public repository that copy config.json; context in metadata of a GGUF file",
    "granite4.2-30b": "tests of a public repository that copy config.json",
    "granite-swash-2b": "config.json in onnxruntime/mobius",
    "gemma-2b": f"{_TUNED}, Lightning-AI/litgpt",
    "gemma-7b": f"{_TUNED}, Lightning-AI/litgpt, transformers' GemmaConfig",
    "gemma3-270m": "config.json in a test of decoderesearch/circuit-tracer",
    "gemma3-1b": "config.json in NVIDIA/TensorRT-LLM and another public repository",
    "gemma3-4b": f"{_COPY}; scaling in Lightning-AI/litgpt",
    "gemma3-12b": f"{_COPY}, Lightning-AI/litgpt",
    "gemma3-27b": "config.json in NVIDIA/TensorRT-LLM, and transformers' Gemma3TextConfig for what it leaves "
    "out; Lightning-AI/litgpt",
    "olmo2-1b": "facebookresearch/fairseq2",
    **dict.fromkeys(("olmo2-7b", "olmo2-13b"), "facebookresearch/fairseq2, Lightning-AI/litgpt"),
    "olmo2-32b": "allenai/OLMo-core; vocabulary and context in facebookresearch/fairseq2",
    **dict.fromkeys(("olmo3-7b", "olmo3-32b"), "AI-Hypercomputer/maxtext, facebookresearch/fairseq2"),
    "exaone4.0-1.2b": "copies of config.json with quantised models",
    "exaone4.0-32b": "config.json in NVIDIA/TensorRT-LLM",
    **dict.fromkeys(("glm4-9b-0414", "glm4-32b-0414"), _TUNED),
    **dict.fromkeys(
        ("hunyuan-0.5b", "hunyuan-1.8b"),
        f"{_TUNED}; base, heads and tied also in notes of a public repository",
    ),
    "hunyuan-7b": "config.json of its folder",
    "phi3-mini-4k": f"transformers' Phi3Config, the window in {_COPY}",
    "phi3.5-mini": _COPY,
    "phi4": _COPY,
    "phi4-mini": f"{_COPY}; sizes also in pytorch/executorch",
    "ministral3-3b": _COPY,
    "ministral3-8b": "transformers' Ministral3Config",
    "devstral-small2-24b": _COPY,
    "mistral-small3.1-24b": "transformers' Mistral3Config",
    "ministral-8b": _COPY,
    "afm-4.5b": "config.json in a public repository that runs it with NeuronX Distributed Inference",
    "smollm3-3b": "the values that AutoConfig reads, in tests of a public repository",
    "seed-oss-36b": _COPY,
    "glm4-9b-chat": "transformers' GlmConfig",
    "cwm": "transformers' CwmConfig",
    **dict.fromkeys(("gemma2-2b", "gemma2-9b", "gemma2-27b"), _COPY),
    "helium1-preview-2b": "transformers' HeliumConfig",
    "ernie4.5-0.3b": "transformers' Ernie4_5Config",
}
"""Preset -> where its values were read (transformers 5.23, November 2026)."""


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
