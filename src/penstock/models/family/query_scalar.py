"""`query_pre_attn_scalar` of Gemma 2 and 3: attention scores are divided by its root; no torch."""

import sys
from typing import TYPE_CHECKING

from penstock.core.checks import is_number
from penstock.core.errors import ConfigError
from penstock.models.family.base import Raw

if TYPE_CHECKING:
    from penstock.models.decoder.config import DecoderConfig


def read_scalar(raw: Raw) -> Raw:
    """Return the factor on scores as a field of DecoderConfig.

    Raises:
        ConfigError: it is not a positive number.
    """
    scalar = raw["query_pre_attn_scalar"]
    if not is_number(scalar) or not 0 < scalar <= sys.float_info.max:
        raise ConfigError("query_pre_attn_scalar must be a positive number", got=scalar)
    return {"attention_multiplier": scalar**-0.5}


def write_scalar(config: "DecoderConfig") -> Raw:
    """Return the key of config.json, a whole number."""
    return {"query_pre_attn_scalar": _scalar(config)}


def check_scalar(config: "DecoderConfig") -> None:
    """Raise ConfigError for a factor that a whole number does not give."""
    if abs(_scalar(config) ** -0.5 - config.attention_scale) > 1e-12:
        raise ConfigError(
            f"attention_multiplier must be 1 / sqrt(n) of a whole number in {config.model_type} models",
            got=config.attention_scale,
        )


def _scalar(config: "DecoderConfig") -> int:
    return max(1, round(config.attention_scale**-2))
