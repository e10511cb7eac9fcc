"""Rotary embedding with a rule for full layers and one for layers with a window; no torch."""

from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError, ModelError
from penstock.models.family.base import Raw
from penstock.models.family.windows import FULL, SLIDING
from penstock.nn.rope_scaling import RopeRule, read_rope, write_rope

if TYPE_CHECKING:
    from penstock.models.decoder.config import DecoderConfig

KINDS = (FULL, SLIDING)


def rule_of_kind(raw: Raw, kind: str, *, bases: dict[str, tuple[str, float]]) -> dict[str, Any]:  # Any: JSON
    """Return a `config.json` whose rotary embedding is that of one kind of layers.

    `rope_scaling` changes the full layers, as in transformers.

    Args:
        bases: kind -> the key beside the rules with its base, and its base where there is none.

    Raises:
        ModelError: `rope_parameters` has something other than a rule for each kind.
    """
    rules = {} if raw.get("rope_parameters") is None else raw["rope_parameters"]
    is_by_kind = isinstance(rules, dict) and rules.keys() <= set(KINDS)
    if not is_by_kind or not all(isinstance(rule, dict | None) for rule in rules.values()):
        raise ModelError(
            f"rope_parameters must have a rule for {FULL} and one for {SLIDING}",
            got=rules,
            fix="Write rope_parameters as transformers 5 does.",
        )
    scaling = raw.get("rope_scaling") if kind == FULL else None
    if not isinstance(scaling, dict | None):
        raise ModelError("rope_scaling must be one rule for all layers", got=scaling)
    key, base = bases[kind]
    rule = {**(rules.get(kind) or {}), **(scaling or {})}
    if rule.get("rope_theta") is None:
        rule["rope_theta"] = base if raw.get(key) is None else raw[key]
    return {**raw, "rope_theta": None, "rope_scaling": None, "rope_parameters": rule}


def read_rules(raw: Raw, kinds: list[str], *, bases: dict[str, tuple[str, float]]) -> dict[str, Any]:
    """Return the fields of DecoderConfig for the rules of both kinds.

    Args:
        kinds: of each layer.
    """
    full, local = (read_rope(rule_of_kind(raw, kind, bases=bases)) for kind in KINDS)
    if local.rotated != 1.0 or local.scaling not in (None, full.scaling):
        raise ConfigError(
            f"Layers of {SLIDING} can have a rope_theta of their own, and no other rule",
            got="a partial_rotary_factor" if local.scaling is None else local.scaling.rope_type,
        )
    thetas = tuple(full.theta if kind == FULL else local.theta for kind in kinds)
    is_in_full_alone = full.scaling is not None and local.scaling is None
    return {
        "layer_rope_theta": None if set(thetas) == {full.theta} else thetas,
        "scaled_layers": FULL if is_in_full_alone else None,
    }


def write_rules(config: "DecoderConfig") -> dict[str, Any]:  # Any: JSON
    """Return the keys of both rules, for transformers 4 and 5."""
    rules = {
        kind: write_rope(rule.theta, rule.scaling, rotated=None) for kind, rule in _rules(config).items()
    }
    return {
        "rope_theta": rules[FULL]["rope_theta"],
        "rope_scaling": rules[FULL]["rope_scaling"],
        "rope_parameters": {kind: rule["rope_parameters"] for kind, rule in rules.items()},
    }


def check_rules(config: "DecoderConfig") -> None:
    """Raise ConfigError if layers of one kind differ."""
    if config.scaled_layers == SLIDING:
        raise ConfigError(f"scaled_layers must be {FULL}, or absent", got=config.scaled_layers)
    for kind, rule in _rules(config).items():
        others = {one.theta for one in _of_kind(config, kind)} - {rule.theta}
        if others:
            raise ConfigError(
                f"layer_rope_theta must be one number for all layers of {kind}",
                got=sorted({rule.theta, *others}),
            )


def _rules(config: "DecoderConfig") -> dict[str, RopeRule]:
    plain = RopeRule(theta=config.rope_theta, scaling=None, rotated=1.0)
    scaled = RopeRule(theta=config.rope_theta, scaling=config.rope_scaling, rotated=1.0)
    without = {FULL: scaled, SLIDING: plain if config.scaled_layers == FULL else scaled}
    return {kind: next(iter(_of_kind(config, kind)), without[kind]) for kind in KINDS}


def _of_kind(config: "DecoderConfig", kind: str) -> list[RopeRule]:
    return [one.rope for one in config.attentions if (one.window is None) == (kind == FULL)]
