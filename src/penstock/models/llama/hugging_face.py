"""Hugging Face format of Llama, read and write: `config.json` and weight names; no torch."""

import json
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from penstock.core.errors import ConfigError, ModelError
from penstock.models.families import FAMILY, IGNORED_KEYS, NEUTRAL, Family, supported_families
from penstock.models.llama.config import LlamaConfig
from penstock.nn.rope_scaling import ROPE_KEYS, read_rope, write_rope

_LONGEST_VALUE = 60
"""Characters of a value in a message."""


def config_of(raw: Mapping[str, Any], *, ignored_keys: Collection[str] = ()) -> LlamaConfig:  # Any: JSON
    """Parse a `config.json` written by transformers 4 or 5, or by Penstock.

    Dropout is ignored: Penstock has none, and inference does not use it.

    Args:
        ignored_keys: keys to pass over that are neither read nor known to be harmless; a key inside another
            is written `rope_scaling.name`.

    Raises:
        ModelError: unsupported model type, missing size, unsupported feature, or unknown key.
    """
    model_type = str(raw.get("model_type"))
    if model_type not in FAMILY:
        raise ModelError("This family of models is not supported", got=model_type, fix=supported_families())
    family = FAMILY[model_type]
    ignored = [name for name in ignored_keys if _has(raw, name)]
    raw = {**family.defaults, **_without(raw, ignored, family)}
    if raw.get("quantization_config"):
        raise ModelError("Quantised weights cannot be opened", fix="Use the model's bf16 or fp32 folder.")
    if raw["hidden_act"] not in ("silu", "swish"):
        raise ModelError(
            "hidden_act must be silu", got=raw["hidden_act"], fix="Only decoders with SwiGLU can be opened."
        )
    theta, scaling = read_rope(raw)
    known_names = {field.name for field in fields(LlamaConfig)} & family.keys
    values = {name: raw[name] for name in known_names if name in raw}
    values |= {"rope_theta": theta, "rope_scaling": scaling}
    values["ignored_keys"] = tuple(dict.fromkeys((*_ignored_before(raw), *ignored)))
    try:
        if "max_window_layers" in family.keys:
            values |= _read_windows(raw)
        _check_kinds(values)
        return LlamaConfig(**values)
    except (ConfigError, TypeError) as error:
        raise ModelError(f"config.json describes no model that can be built: {error}") from error


def _ignored_before(raw: Mapping[str, Any]) -> list[str]:  # Any: JSON
    """Return the keys that were ignored when the folder that this one was made from was opened."""
    keys = raw.get(IGNORED_KEYS) or []
    if not isinstance(keys, list) or not all(isinstance(name, str) for name in keys):
        raise ModelError(f"{IGNORED_KEYS} must be a list of keys", got=keys, fix=f"Remove {IGNORED_KEYS}.")
    return keys


def _has(raw: Mapping[str, Any], name: str) -> bool:  # Any: JSON
    """Return True if `raw` has a key, or the object under the first part of its name has the rest."""
    section, _, inner = name.partition(".")
    return name in raw or (isinstance(raw.get(section), Mapping) and inner in raw[section])


def _without(raw: Mapping[str, Any], ignored: Collection[str], family: Family) -> dict[str, Any]:  # Any: JSON
    """Return `raw` without the ignored keys.

    Raises:
        ModelError: a key is unknown, or an ignored one is read.
    """
    for name in ignored:
        section, _, inner = name.partition(".")
        if name in family.keys or (section in family.keys and inner in ROPE_KEYS):
            raise ModelError(
                f"{name} of config.json is read, and cannot be ignored",
                fix=f"Leave --ignore-key {name} out, or correct the value in config.json.",
            )
    kept: dict[str, Any] = {}
    for key, value in raw.items():
        if key in ignored:
            continue
        inside = {name.removeprefix(f"{key}.") for name in ignored if name.startswith(f"{key}.")}
        kept[key] = (
            {name: one for name, one in value.items() if name not in inside}
            if inside and isinstance(value, Mapping)
            else value
        )
    unknown = {key: value for key, value in kept.items() if not family.is_harmless(key, value)}
    if unknown:
        raise _unread(unknown)
    return kept


def _unread(unknown: Mapping[str, Any]) -> ModelError:  # Any: JSON
    """Return the error for keys that are not read and may matter, with their values."""
    pairs = ", ".join(f"{key} = {_quoted(value)}" for key, value in unknown.items())
    options = " ".join(f"--ignore-key {key}" for key in unknown)
    one = len(unknown) == 1
    return ModelError(
        f"config.json has {'a key' if one else 'keys'} that Penstock does not read: {pairs}",
        fix=f"The model may need {'it' if one else 'them'}. If it does not, open the folder with {options}.",
    )


def _quoted(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


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
    for name in NEUTRAL.keys() - config.family.keys:
        del values[name]
    if ignored := values.pop("ignored_keys"):
        values[IGNORED_KEYS] = list(ignored)
    if "attention_multiplier" in values:
        values["attention_multiplier"] = config.attention_scale
    if "max_window_layers" in values:
        values["use_sliding_window"] = config.sliding_window is not None
    return values


def _check_kinds(values: Mapping[str, Any]) -> None:  # Any: JSON
    """Raise for values of a wrong type."""
    for field in fields(LlamaConfig):
        if field.name in ("model_type", "ignored_keys") or field.name not in values:
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
    layers, kinds = raw.get("num_hidden_layers", 0), raw["layer_types"]
    if not raw["use_sliding_window"] or raw["sliding_window"] is None:
        return {"sliding_window": None, "max_window_layers": 0}
    whole = min(raw["max_window_layers"], layers)
    if kinds is not None:
        if not isinstance(kinds, list):
            raise ConfigError("layer_types has the wrong type", got=kinds)
        whole = kinds.count("full_attention")
        if kinds != ["full_attention"] * whole + ["sliding_attention"] * (layers - whole):
            raise ModelError(
                "layer_types must be full attention first, then sliding attention",
                got=kinds,
                fix="Other orders are not supported: docs/explanation/models.md.",
            )
    if whole == layers:
        return {"sliding_window": None, "max_window_layers": 0}
    return {"sliding_window": raw["sliding_window"], "max_window_layers": whole}


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
    names = {}
    for name in config.parameter_shapes:
        if name in _MODEL:
            names[name] = _MODEL[name]
            continue
        _, layer, inside = name.split(".", 2)
        part, _, kind = inside.rpartition(".")
        names[name] = f"model.layers.{layer}.{_BLOCK[part]}.{kind}"
    return names
