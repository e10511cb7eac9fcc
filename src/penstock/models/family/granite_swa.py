"""Granite SWA (IBM, 2026): Granite with attention sinks, windows, and a rotary base for each layer."""

import sys
from typing import TYPE_CHECKING, Any

from penstock.core.checks import is_number
from penstock.core.errors import ConfigError
from penstock.models.family.base import Family, Raw
from penstock.models.family.granite import FAMILY as GRANITE
from penstock.models.family.windows import FULL, SLIDING, read_layer_types, write_layer_types

if TYPE_CHECKING:
    from penstock.models.decoder.config import DecoderConfig


def _read(raw: Raw) -> Raw:
    return {
        **read_layer_types(raw, default=(FULL, SLIDING, SLIDING, SLIDING)),
        "layer_rope_theta": _read_bases(raw),
    }


def _read_bases(raw: Raw) -> tuple[float, ...] | None:
    """Return the rotary base of each layer, 0 for none; None: that of the model."""
    bases: Any = raw["layer_rope_theta"]
    if bases is None:
        return None
    most = sys.float_info.max
    if not isinstance(bases, list) or not all(is_number(base) and 0 <= base <= most for base in bases):
        raise ConfigError("layer_rope_theta must be a list of numbers, none negative or infinite", got=bases)
    return None if set(bases) == {raw["rope_theta"]} else tuple(map(float, bases))


def _write(config: "DecoderConfig") -> Raw:
    return {
        **write_layer_types(config),
        "layer_rope_theta": list(config.layer_rope_theta or [config.rope_theta] * config.num_hidden_layers),
    }


FAMILY = Family(
    architecture="GraniteSWAForCausalLM",
    own_keys=GRANITE.own_keys | {"sliding_window", "layer_types", "layer_rope_theta"},
    defaults={
        **GRANITE.defaults,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 128,
        "layer_types": None,
        "layer_rope_theta": None,
    },
    read=_read,
    write=_write,
    biases="chosen",
    has_sinks=True,
)
