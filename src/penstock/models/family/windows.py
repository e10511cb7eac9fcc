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
    window = raw["sliding_window"] if raw["use_sliding_window"] else None
    kinds = None if kinds is None else checked_kinds(kinds, layers, window=window)
    if window is None:
        return none
    whole = min(raw["max_window_layers"], layers)
    if kinds is not None:
        whole = kinds.count(FULL)
        if kinds != [FULL] * whole + [SLIDING] * (layers - whole):
            return {"sliding_window": window, "max_window_layers": 0, "layer_types": tuple(kinds)}
    if whole == layers:
        return none
    return {"sliding_window": window, "max_window_layers": whole, "layer_types": None}


def write_first_whole(config: "DecoderConfig") -> Raw:
    """Return Qwen's keys of the windows."""
    return {"use_sliding_window": config.sliding_window is not None}


def read_layer_types(raw: Raw, *, default: tuple[str, ...]) -> dict[str, Any]:  # Any: fields of DecoderConfig
    """Read which layers have a window from `layer_types`.

    Args:
        default: kinds of layers that repeat where config.json has no `layer_types`.
    """
    layers, kinds, window = raw.get("num_hidden_layers", 0), raw["layer_types"], raw["sliding_window"]
    repeated = [default[layer % len(default)] for layer in range(layers)]
    kinds = repeated if kinds is None else checked_kinds(kinds, layers, window=window)
    if SLIDING not in kinds or window is None:
        return {"sliding_window": None, "layer_types": None}
    return {"layer_types": None if FULL not in kinds else tuple(kinds)}


def write_layer_types(config: "DecoderConfig") -> Raw:
    """Return `layer_types`, with which transformers opens any order of layers."""
    return {"layer_types": [FULL if window is None else SLIDING for window in config.windows]}


def checked_kinds(kinds: object, layers: int, *, window: object) -> list[str]:
    """Return the value of `layer_types`; raise ConfigError unless it has a kind for each layer.

    Args:
        window: of the sliding layers; None: config.json gives none, so that no layer can be one.
    """
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {FULL, SLIDING}:
        raise ConfigError(
            f"layer_types must name {FULL} or {SLIDING} for each of the {layers} layers",
            got=kinds,
        )
    if window is None and SLIDING in kinds:
        raise ConfigError(
            f"Some layers are {SLIDING}, and config.json says that no layer has a window",
            fix="Set sliding_window, and use_sliding_window where the family has it, or correct layer_types.",
        )
    return kinds
