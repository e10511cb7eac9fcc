"""A `config.json` of transformers to a decoder's shape and back; no torch."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from penstock.core.errors import ConfigError, ModelError, nearest
from penstock.models.families import FAMILY, NEUTRAL
from penstock.models.llama.config import LlamaConfig
from penstock.nn.rope_scaling import read_rope, write_rope


def config_of(raw: Mapping[str, Any]) -> LlamaConfig:  # Any: JSON
    """Read the content of a `config.json` written by transformers 4 or 5, or by Penstock.

    Dropout is not read: Penstock has none, and inference never did.

    Raises:
        ModelError: another kind of model, a missing size, or a feature Penstock does not have.
    """
    model_type = str(raw.get("model_type"))
    if model_type not in FAMILY:
        known = nearest(model_type, list(FAMILY))
        raise ModelError("Models of this type cannot be opened", got=model_type, fix=known)
    if raw.get("quantization_config"):
        raise ModelError("Quantised weights cannot be opened", fix="Use the model's bf16 or fp32 folder.")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError("hidden_act must be silu", got=raw["hidden_act"])
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
        raise ModelError(f"It describes no model that can be built: {error}") from error


def config_json(config: LlamaConfig) -> dict[str, Any]:  # Any: JSON
    """Return the content of a `config.json` that transformers 4 and 5 open."""
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
    """Refuse a text, a fraction or null where only something else can be."""
    for field in fields(LlamaConfig):
        if field.name == "model_type" or field.name not in values:
            continue
        value, kind = values[field.name], field.type
        allowed: Any = kind | int if kind in (float, float | None) else kind
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{field.name} is of the wrong kind", got=value)


def _read_windows(raw: Mapping[str, Any]) -> dict[str, int | None]:  # Any: JSON
    """Read which layers of a Qwen have a window, from any of the three keys that say it.

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
            raise ModelError("layer_types must be full attention first, then sliding attention", got=kinds)
    if whole == layers:
        return {"sliding_window": None, "max_window_layers": 0}
    return {"sliding_window": raw.get("sliding_window", 4096), "max_window_layers": whole}
