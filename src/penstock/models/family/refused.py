"""Parts of models that Penstock does not have, read from a `config.json`; no torch.

The keys of a `config.json` tell most of it, whatever the family is called. Some differences have no key; they
are named by model_type.
"""

from collections.abc import Callable, Mapping
from typing import Any

Raw = Mapping[str, Any]  # Any: JSON


def _any(*keys: str) -> Callable[[Raw], bool]:
    """Return a test for a key with a value that is neither absent nor zero."""
    return lambda raw: any(raw.get(key) for key in keys)


def _kind(*kinds: str) -> Callable[[Raw], bool]:
    return lambda raw: any(
        kind in str(layer)
        for key in ("layer_types", "layers_block_type", "hybrid_override_pattern", "block_types")
        if isinstance(layers := raw.get(key), list | str)
        for layer in layers
        for kind in kinds
    )


_ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh", "relu2")


def _activation(raw: Raw) -> bool:
    names = (raw.get(key) for key in ("hidden_act", "hidden_activation", "activation_function", "ffn_act"))
    return any(isinstance(name, str) and name not in _ACTIVATIONS for name in names)


_BY_KEY: tuple[tuple[str, Callable[[Raw], bool]], ...] = (
    ("an encoder", _any("is_encoder_decoder", "encoder_layers", "encoder_config")),
    (
        "experts",
        _any(
            "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts",
            "moe_intermediate_size", "moe_topk", "expert_layer_period",
        ),
    ),
    ("latent attention", _any("kv_lora_rank", "q_lora_rank")),
    (
        "Mamba layers",
        _any(
            "mamba_d_state", "ssm_state_size", "mamba_n_heads", "mamba_num_heads", "mamba_d_conv",
            "state_size",
        ),
    ),
    (
        "linear attention",
        lambda raw: _any("linear_num_value_heads", "linear_attn_config", "lru_width")(raw)
        or _kind("linear_attention", "recurrent")(raw),
    ),
    ("short convolutions", lambda raw: _any("conv_L_cache")(raw) or _kind("conv")(raw)),
    ("chunked windows", _any("attention_chunk_size")),
    (
        "LayerNorm",
        lambda raw: _any(
            "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_epsilon", "layernorm_embedding"
        )(raw) and not _has_root_mean_square_norms(raw),
    ),
    ("learned positions, or none but a bias", _any("n_positions", "alibi", "max_seq_len", "n_ctx")),
    ("another activation than SiLU, GELU with tanh or squared ReLU", _activation),
    ("a rotary embedding per kind of layer", lambda raw: _nested(raw.get("rope_parameters"))),
)  # fmt: skip

MISSING_BY_TYPE: Mapping[str, tuple[str, ...]] = {
    "cpmant": ("positions of segments",),
    "diffllama": ("differential attention",),
    "emu3_text_model": ("images as tokens",),
    "hrm_text": ("blocks that are repeated",),
    "internlm3": ("biases that its config.json names otherwise",),
    "iquestcoder": ("blocks that are repeated",),
    "mllama": ("attention to images",),
    "mllama_text_model": ("attention to images",),
    "moshi": ("audio",),
    "phi4_multimodal": ("adapters for images and speech",),
    "xlstm": ("recurrent layers",),
    "bitnet": ("norms inside attention and feed-forward",),
    "nemotron": ("LayerNorm",),
    "apertus": ("a learned activation (xIELU)",),
    "gemma3n_text": ("inputs per layer",),
    "gemma4_text": ("heads whose size differs by layer",),
    "hyperclovax": ("norms whose place config.json chooses",),
    "jais2": ("LayerNorm",),
    "nanochat": ("norms without weights",),
    "olmo": ("norms without weights",),
}


def missing_parts(raw: Raw) -> list[str]:
    """Return what a model has that Penstock lacks, as far as its `config.json` tells.

    >>> missing_parts({"model_type": "deepseek_v3", "n_routed_experts": 256, "kv_lora_rank": 512})
    ['experts', 'latent attention']
    >>> missing_parts({"model_type": "chatglm", "rmsnorm": True, "layernorm_epsilon": 1e-5, "auto_map": {}})
    ['the network of its own code (auto_map)']
    """
    found = [name for name, has in _BY_KEY if has(raw)]
    by_type = MISSING_BY_TYPE.get(str(raw.get("model_type")), ())
    parts = [*found, *(name for name in by_type if name not in found)]
    has_code = isinstance(raw.get("auto_map"), Mapping)
    return parts or (["the network of its own code (auto_map)"] if has_code else [])


def _has_root_mean_square_norms(raw: Raw) -> bool:
    """Return True for models whose keys name LayerNorm, though their norms have no mean."""
    return bool(raw.get("rmsnorm")) or raw.get("model_type") == "exaone"


def _nested(rule: object) -> bool:
    return isinstance(rule, Mapping) and any(isinstance(value, Mapping) for value in rule.values())
