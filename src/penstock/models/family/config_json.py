"""`config.json` of every family, read and written; no torch."""

import json
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, get_args

from penstock.core.errors import ConfigError, ModelError
from penstock.models.decoder.config import DecoderConfig, check_ceilings
from penstock.models.families import FAMILY, supported_families
from penstock.models.family.base import IGNORED_KEYS, NEUTRAL, QUANTISATION, SIZES, Family
from penstock.models.family.refused import missing_parts
from penstock.nn.rope_scaling import ROPE_KEYS, read_rope, write_rope

_TIED = "tie_word_embeddings"
_LONGEST_VALUE = 60
"""Characters of a value in a message."""


def config_of(raw: Mapping[str, Any], *, ignored_keys: Collection[str] = ()) -> DecoderConfig:  # Any: JSON
    """Parse a `config.json` written by transformers 4 or 5, or by Penstock.

    Dropout is ignored: Penstock has none, and inference does not use it.

    Args:
        ignored_keys: keys to pass over that are neither read nor known to be harmless; a key inside another
            is written `rope_scaling.name`.

    Raises:
        ModelError: unsupported model type, missing size, unsupported feature, or unknown key.
    """
    whole, raw = raw, text_part(raw)
    model_type = str(raw.get("model_type"))
    if model_type not in FAMILY:
        parts = missing_parts(raw)
        lacks = f": Penstock lacks {', '.join(parts)}" if parts else ""
        raise ModelError(
            f"This family of models is not supported{lacks}", got=model_type, fix=supported_families()
        )
    family: Family = FAMILY[model_type]
    ignored = [name for name in ignored_keys if _has(raw, name)]
    if how := next(filter(None, map(raw.get, QUANTISATION)), None):
        raise ModelError(
            "Quantised weights cannot be opened",
            got=(how.get("quant_method") if isinstance(how, Mapping) else None) or how,
            fix="Use the model's bfloat16 or float32 folder.",
        )
    sizes = {} if raw is whole else family.sizes
    raw = {**sizes, **family.defaults, **_without(raw, ignored, family)}
    if raw[family.activation_key] not in family.activation_names:
        raise ModelError(
            f"{family.activation_key} must be {family.activation_names[0]}",
            got=raw[family.activation_key],
            fix=f"Penstock computes {model_type} with that activation only.",
        )
    rope = read_rope(family.full_rope(raw), default=family.default_rope, names=family.rope_names)
    known_names = {field.name for field in fields(DecoderConfig)} & (family.keys - {"partial_rotary_factor"})
    values = {name: raw[name] for name in known_names if name in raw}
    values |= {"rope_theta": rope.theta, "rope_scaling": rope.scaling}
    if family.rotates_part:
        values["partial_rotary_factor"] = rope.rotated
    elif rope.rotated != 1.0:
        raise ModelError(
            f"{model_type} models rotate whole heads, and config.json has a partial_rotary_factor",
            got=rope.rotated,
            fix="Take config.json and the weights from one download of the model.",
        )
    values["ignored_keys"] = tuple(dict.fromkeys((*_ignored_before(raw), *ignored)))
    try:
        _check_kinds(values)
        check_ceilings(values)
        _check_has(values, {"num_hidden_layers"})  # families count their layers as they read
        values |= family.read({**raw, "rope_theta": rope.theta})
        _check_kinds(values)
        _check_has(values, SIZES)
        return DecoderConfig(**values)
    except (ConfigError, TypeError) as error:
        raise ModelError(f"config.json describes no model that can be built: {error}") from error


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:  # Any: JSON
    """Return the part of a `config.json` that describes the language model.

    A model that also reads images or audio has it under `text_config`. Keys of the whole model say how its
    matrices are quantised, and whose code computes it: transformers does not read these of the part. Matrices
    are tied if either says so: transformers 4 read the part, transformers 5 reads the whole.
    """
    text = raw.get("text_config")
    if str(raw.get("model_type")) in FAMILY or not isinstance(text, Mapping):
        return raw
    shared = (_TIED, *QUANTISATION, "auto_map", IGNORED_KEYS)
    part = {**text, **{key: raw[key] for key in shared if raw.get(key)}}
    if raw.get(_TIED) is False:
        part.setdefault(_TIED, False)
    return part


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


def config_json(config: DecoderConfig) -> dict[str, Any]:  # Any: JSON
    """Return a `config.json` that transformers 4 and 5 can open."""
    rotated = config.partial_rotary_factor if config.family.rotates_part else None
    values: dict[str, Any] = {
        "architectures": [config.family.architecture],
        **{field.name: getattr(config, field.name) for field in fields(config)},
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.size_of_head,
        config.family.activation_key: config.family.activation_names[0],
    }
    for name in NEUTRAL.keys() - config.family.own_keys:
        del values[name]
    values |= write_rope(config.rope_theta, config.rope_scaling, rotated=rotated)
    if ignored := values.pop("ignored_keys"):
        values[IGNORED_KEYS] = list(ignored)
    if "attention_multiplier" in values:
        values["attention_multiplier"] = config.attention_scale
    return {**values, **config.family.write(config)}


def _check_has(values: Mapping[str, Any], sizes: Collection[str]) -> None:  # Any: JSON
    """Raise for sizes that are missing."""
    if missing := sorted(set(sizes) - values.keys()):
        raise ModelError(
            f"config.json lacks {', '.join(missing)}", fix="Take it from where the weights came from."
        )


def _check_kinds(values: Mapping[str, Any]) -> None:  # Any: JSON
    """Raise for values of a wrong type."""
    for field in fields(DecoderConfig):
        kind: Any = field.type
        if field.name not in values or not all(isinstance(one, type) for one in get_args(kind) or (kind,)):
            continue  # an annotation that isinstance cannot compare: the family reads such a field itself
        value = values[field.name]
        allowed = kind | int if kind in (float, float | None) else kind
        is_flag = kind in (bool, bool | None)
        if not isinstance(value, allowed) or (isinstance(value, bool) and not is_flag):
            raise ConfigError(f"{field.name} has the wrong type", got=value)
