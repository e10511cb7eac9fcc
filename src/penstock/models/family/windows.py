"""Layers that have an attention window, read from a `config.json` and written; no torch."""

from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError
from penstock.models.family.base import Raw

if TYPE_CHECKING:
    from penstock.models.decoder.config import DecoderConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def read_first_whole(raw: Raw) -> dict[str, Any]:  # Any: fields of DecoderConfig
    """Read which layers of a Qwen model have a window, from its three redundant keys."""
    layers, kinds = raw.get("num_hidden_layers", 0), raw["layer_types"]
    none = {"sliding_window": None, "max_window_layers": 0, "layer_types": None}
    if not raw["use_sliding_window"] or raw["sliding_window"] is None:
        return none
    whole = min(raw["max_window_layers"], layers)
    if kinds is not None:
        whole = checked_kinds(kinds, layers).count(FULL)
        if kinds != [FULL] * whole + [SLIDING] * (layers - whole):
            window = {"sliding_window": raw["sliding_window"], "max_window_layers": 0}
            return {**window, "layer_types": tuple(kinds)}
    if whole == layers:
        return none
    return {"sliding_window": raw["sliding_window"], "max_window_layers": whole, "layer_types": None}


def write_first_whole(config: "DecoderConfig") -> Raw:
    """Return Qwen's keys of the windows."""
    return {"use_sliding_window": config.sliding_window is not None}


def read_layer_types(raw: Raw, *, default: tuple[str, ...]) -> dict[str, Any]:  # Any: fields of DecoderConfig
    """Read which layers have a window from `layer_types`.

    Args:
        default: kinds of layers that repeat where config.json has no `layer_types`.
    """
    layers, kinds = raw.get("num_hidden_layers", 0), raw["layer_types"]
    if raw["sliding_window"] is None:
        return {"sliding_window": None, "layer_types": None}
    repeated = [default[layer % len(default)] for layer in range(layers)]
    kinds = repeated if kinds is None else checked_kinds(kinds, layers)
    if SLIDING not in kinds:
        return {"sliding_window": None, "layer_types": None}
    return {"layer_types": None if FULL not in kinds else tuple(kinds)}


def write_layer_types(config: "DecoderConfig") -> Raw:
    """Return `layer_types`, with which transformers opens any order of layers."""
    return {"layer_types": [FULL if window is None else SLIDING for window in config.windows]}


def checked_kinds(kinds: object, layers: int) -> list[str]:
    """Return the value of `layer_types`; raise ConfigError unless it has a kind for each layer."""
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {FULL, SLIDING}:
        raise ConfigError(
            f"layer_types must name {FULL} or {SLIDING} for each of the {layers} layers",
            got=kinds,
        )
    return kinds
