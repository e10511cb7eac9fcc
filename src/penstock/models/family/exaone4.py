"""EXAONE 4 (LG, arXiv:2507.11407): norms after layers; with windows, full layers have no positions."""

from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError
from penstock.models.family.base import DEFAULTS, Family, Raw
from penstock.models.family.windows import FULL, SLIDING, checked_kinds, read_layer_types, write_layer_types

if TYPE_CHECKING:
    from penstock.models.decoder.config import DecoderConfig

_LETTERS = {"L": SLIDING, "G": FULL}


def _read(raw: Raw) -> Raw:
    kinds = _kinds(raw)
    bases = tuple(0.0 if kind == FULL else raw["rope_theta"] for kind in kinds)
    has_rotated_full = raw["sliding_window"] is None or FULL not in kinds
    return {
        **read_layer_types({**raw, "layer_types": kinds}, default=(FULL,)),
        "layer_rope_theta": None if has_rotated_full else bases,
    }


def _kinds(raw: Raw) -> list[str]:
    layers, pattern = raw["num_hidden_layers"], raw["sliding_window_pattern"]
    if raw["layer_types"] is not None:
        return checked_kinds(raw["layer_types"], layers, window=raw["sliding_window"])
    if raw["sliding_window"] is None:
        return [FULL] * layers
    if isinstance(pattern, str) and pattern and set(pattern) <= set(_LETTERS):
        return [*(_LETTERS[pattern[i % len(pattern)]] for i in range(layers - 1)), FULL]
    if not isinstance(pattern, int) or pattern < 1:
        raise ConfigError(
            'sliding_window_pattern must be a number of layers, at least 1, or letters such as "LLLG"',
            got=pattern,
        )
    return [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]


def _check(config: "DecoderConfig") -> None:
    has_windows = any(window is not None for window in config.windows)
    for layer, attention in enumerate(config.attentions):
        rule, is_rotated = attention.rope, attention.window is not None or not has_windows
        if (rule.rotated > 0) != is_rotated or (is_rotated and rule.theta != config.rope_theta):
            raise ConfigError(
                "layer_rope_theta of exaone4 models must be 0 in full layers if other layers have a window, "
                f"and rope_theta {config.rope_theta:g} elsewhere",
                got=f"{rule.theta:g} in layer {layer}" if rule.rotated else f"0 in layer {layer}",
            )


def _write(config: "DecoderConfig") -> Raw:
    return write_layer_types(config)


FAMILY = Family(
    architecture="Exaone4ForCausalLM",
    own_keys=frozenset({"sliding_window", "sliding_window_pattern", "layer_types"}),
    settings=frozenset({"layer_rope_theta"}),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": None,
    },
    read=_read,
    write=_write,
    check=_check,
    qk_norm="head",
    norm_placement="post",
)
