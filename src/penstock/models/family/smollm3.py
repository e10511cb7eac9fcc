"""SmolLM3 (Hugging Face, 2025): Llama without positions in every fourth layer."""

from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError
from penstock.models.family.base import BOOKKEEPING, DEFAULTS, Family, Raw
from penstock.models.family.windows import (
    FULL,
    SLIDING,
    read_layer_types,
    write_layer_types,
)

if TYPE_CHECKING:
    from penstock.models.decoder.config import DecoderConfig


def _read(raw: Raw) -> Raw:
    rotated = _rotated(raw)
    kinds, has_windows = raw["layer_types"], raw["use_sliding_window"] and raw["sliding_window"] is not None
    if kinds is None:
        kinds = [FULL if flag or not has_windows else SLIDING for flag in rotated]
    bases = tuple(raw["rope_theta"] if flag else 0.0 for flag in rotated)
    window = {"sliding_window": raw["sliding_window"] if has_windows else None}
    return {
        **window,
        **read_layer_types({**raw, **window, "layer_types": kinds}, default=(FULL,)),
        "layer_rope_theta": None if all(rotated) else bases,
    }


def _rotated(raw: Raw) -> list[bool]:
    """Return for each layer whether it has positions."""
    layers, flags, interval = raw["num_hidden_layers"], raw["no_rope_layers"], raw["no_rope_layer_interval"]
    if flags is None:
        if not isinstance(interval, int) or interval < 1:
            raise ConfigError("no_rope_layer_interval must be a number of layers, at least 1", got=interval)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(flags, list) or len(flags) < layers or not all(flag in (0, 1) for flag in flags):
        raise ConfigError(f"no_rope_layers must have 0 or 1 for each of the {layers} layers", got=flags)
    return [bool(flag) for flag in flags[:layers]]


def _check(config: "DecoderConfig") -> None:
    others = set(config.layer_rope_theta or ()) - {0.0, config.rope_theta}
    if others:
        raise ConfigError(
            f"layer_rope_theta must be 0 or rope_theta {config.rope_theta:g} in smollm3 models",
            got=sorted(others),
        )


def _write(config: "DecoderConfig") -> Raw:
    return {
        **write_layer_types(config),
        "use_sliding_window": config.sliding_window is not None,
        "no_rope_layers": [int(attention.rope.rotated > 0) for attention in config.attentions],
    }


FAMILY = Family(
    architecture="SmolLM3ForCausalLM",
    own_keys=frozenset({
        "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "layer_types", "no_rope_layers",
        "no_rope_layer_interval",
    }),
    ignored=BOOKKEEPING | {"max_window_layers"},  # published, and not read by transformers
    settings=frozenset({"layer_rope_theta"}),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "use_sliding_window": False,
        "layer_types": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
    default_rope={"rope_theta": 2e6},
    read=_read,
    write=_write,
    check=_check,
    biases="chosen",
)  # fmt: skip
