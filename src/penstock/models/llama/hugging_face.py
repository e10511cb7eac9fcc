"""Hugging Face format of Llama, read and write: `config.json` and weight names; no torch."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from penstock.core.errors import ConfigError, ModelError
from penstock.models.families import FAMILY, NEUTRAL, supported_families
from penstock.models.llama.config import LlamaConfig
from penstock.nn.rope_scaling import read_rope, write_rope


def config_of(raw: Mapping[str, Any]) -> LlamaConfig:  # Any: JSON
    """Parse a `config.json` written by transformers 4 or 5, or by Penstock.

    Dropout is ignored: Penstock has none, and inference does not use it.

    Raises:
        ModelError: unsupported model type, missing size, or unsupported feature.
    """
    model_type = str(raw.get("model_type"))
    if model_type not in FAMILY:
        raise ModelError("This family of models is not supported", got=model_type, fix=supported_families())
    if raw.get("quantization_config"):
        raise ModelError("Quantised weights cannot be opened", fix="Use the model's bf16 or fp32 folder.")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(
            "hidden_act must be silu", got=raw["hidden_act"], fix="Only decoders with SwiGLU can be opened."
        )
    theta, scaling = read_rope(raw)
    family = FAMILY[model_type]
    known_names = {field.name for field in fields(LlamaConfig)} - {"rope_theta", "rope_scaling"}
    known_names -= {name for name in NEUTRAL.keys() - family.fields if raw.get(name) is None}
    read = {name: value for name, value in raw.items() if name in known_names}
    values = {**family.defaults, **read, "rope_theta": theta, "rope_scaling": scaling}
    if "max_window_layers" in family.fields:
        values |= _read_windows(raw)
    try:
        _check_kinds(values)
        return LlamaConfig(**values)
    except (ConfigError, TypeError) as error:
        raise ModelError(f"config.json describes no model that can be built: {error}") from error


def config_json(config: LlamaConfig) -> dict[str, Any]:  # Any: JSON
    """Return a `config.json` that transformers 4 and 5 can open."""
    values: dict[str, Any] = {
        "architectures": [config.family.architecture],
        **{field.name: getattr(config, field.name) for field in fields(config)},
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.size_of_head,
        "hidden_act": "silu",
        **write_rope(config.rope_theta, config.rope_scaling),
    }
    for name in NEUTRAL.keys() - config.family.fields:
        del values[name]
    if "attention_multiplier" in values:
        values["attention_multiplier"] = config.attention_scale
    if "max_window_layers" in values:
        values["use_sliding_window"] = config.sliding_window is not None
    return values


def _check_kinds(values: Mapping[str, Any]) -> None:  # Any: JSON
    """Raise for values of a wrong type."""
    for field in fields(LlamaConfig):
        if field.name == "model_type" or field.name not in values:
            continue
        value, kind = values[field.name], field.type
        allowed: Any = kind | int if kind in (float, float | None) else kind
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{field.name} has the wrong type", got=value)


def _read_windows(raw: Mapping[str, Any]) -> dict[str, int | None]:  # Any: JSON
    """Read which layers of a Qwen model have a window, from its three redundant keys.

    Raises:
        ModelError: full and windowed layers alternate.
    """
    layers = raw.get("num_hidden_layers", 0)
    if not raw.get("use_sliding_window", False) or raw.get("sliding_window", 4096) is None:
        return {"sliding_window": None, "max_window_layers": 0}
    kinds = raw.get("layer_types")
    whole = min(raw.get("max_window_layers", 28), layers)
    if kinds is not None:
        whole = kinds.count("full_attention")
        if kinds != ["full_attention"] * whole + ["sliding_attention"] * (layers - whole):
            raise ModelError(
                "layer_types must be full attention first, then sliding attention",
                got=kinds,
                fix="Other orders are not supported: docs/explanation/models.md.",
            )
    if whole == layers:
        return {"sliding_window": None, "max_window_layers": 0}
    return {"sliding_window": raw.get("sliding_window", 4096), "max_window_layers": whole}


_MODEL = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "unembed.weight": "lm_head.weight",
}
_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def hugging_face_names(config: LlamaConfig) -> dict[str, str]:
    """Return Penstock's name -> Hugging Face's name of every tensor, in model order."""
    names = {"embed.weight": _MODEL["embed.weight"]}
    biased = {f"attention.{name}" for name in config.attention_biases}
    if config.mlp_bias:
        biased |= {"mlp.gate", "mlp.up", "mlp.down"}
    absent = set() if config.family.has_query_key_norm else {"attention.query_norm", "attention.key_norm"}
    block = {ours: theirs for ours, theirs in _BLOCK.items() if ours not in absent}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in block.items():
            for kind in ("weight", "bias") if ours in biased else ("weight",):
                names[f"layers.{layer}.{ours}.{kind}"] = f"model.layers.{layer}.{theirs}.{kind}"
    names["norm.weight"] = _MODEL["norm.weight"]
    if not config.tie_word_embeddings:
        names["unembed.weight"] = _MODEL["unembed.weight"]
    return names
