"""Settings that extend rotary position embeddings beyond the trained context; no torch.

Six published rules, with the field names of Hugging Face's `rope_parameters`:

- linear: positions divided by `factor` (Chen et al., "Extending context window of large language
  models via positional interpolation", arXiv:2306.15595);
- dynamic: the base grows with the longest position beyond the context ("NTK-aware", 2023);
- ntk_alpha: the base grows by a fixed amount (HunYuan, whose config.json calls it dynamic);
- yarn: per-frequency mix of the two and a temperature (Peng et al., arXiv:2309.00071);
- llama3: the rule of Llama 3.1, which leaves high frequencies unchanged;
- longrope: a divisor of its own for each frequency, of two sets: one for texts up to the original context and
  one for longer texts (Ding et al., "LongRoPE", arXiv:2402.13753).
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal, cast

from penstock.core.checks import is_number
from penstock.core.errors import ConfigError, ModelError, nearest

RopeType = Literal["linear", "dynamic", "yarn", "llama3", "longrope", "ntk_alpha"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies; fields that a rule does not use must stay unset."""

    rope_type: RopeType
    """Name of the rule."""
    factor: float
    """Context after scaling divided by context before, at least 1."""
    original_max_position_embeddings: int | None = None
    """Tokens of context before scaling; needed by yarn, llama3 and longrope."""
    low_freq_factor: float | None = None
    """llama3: wavelengths above original context / this are divided by `factor`."""
    high_freq_factor: float | None = None
    """llama3: wavelengths below original context / this are unchanged."""
    attention_factor: float | None = None
    """yarn and longrope: factor on cosines and sines. Unset: 0.1 ln(factor) + 1 for yarn, and
    sqrt(1 + ln(factor) / ln(original_max_position_embeddings)) for longrope."""
    beta_fast: float | None = None
    """yarn: rotations over the original context above which a frequency is unchanged; unset: 32."""
    beta_slow: float | None = None
    """yarn: rotations below which a frequency is divided by `factor`; unset: 1."""
    mscale: float | None = None
    """yarn as in DeepSeek: numerator of the attention factor, together with `mscale_all_dim`."""
    mscale_all_dim: float | None = None
    """yarn as in DeepSeek: denominator of the attention factor."""
    truncate: bool | None = None
    """yarn: round the mixing range to whole frequencies; unset: yes."""
    alpha: float | None = None
    """ntk_alpha: the base is multiplied by alpha^(d / (d - 2)) for heads of d rotated dimensions."""
    llama_4_scaling_beta: float | None = None
    """yarn of Ministral 3: weight of ln(1 + floor(position / original context)) in the factor on a query."""
    short_factor: tuple[float, ...] | None = None
    """longrope: divisor of each frequency where no text is longer than the original context."""
    long_factor: tuple[float, ...] | None = None
    """longrope: divisor of each frequency where texts may be longer than the original context."""

    def __post_init__(self) -> None:
        """Check the fields; raise ConfigError for a number out of range, a missing field or another rule's
        field."""
        self._check_ranges()
        needed, optional = _FIELDS[self.rope_type]
        for name in needed:
            if getattr(self, name) is None:
                raise ConfigError(f"rope_scaling.{name} is needed by {self.rope_type}", fix=f"Set {name}.")
        for name in set(self.__dataclass_fields__) - {"rope_type", "factor", *needed, *optional}:
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"rope_scaling.{name} has no meaning for {self.rope_type}", got=getattr(self, name)
                )
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and high <= low:
            raise ConfigError("rope_scaling.high_freq_factor must exceed low_freq_factor", got=(low, high))

    def _check_ranges(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= _MAX:
                raise ConfigError(
                    f"rope_scaling.{name} must be at least {least:g}, and at most {_MAX:,}", got=value
                )
        for name in _DIVISORS:
            for divisor in getattr(self, name) or ():
                if not _MIN <= divisor <= _MAX:
                    raise ConfigError(
                        f"rope_scaling.{name} must have positive numbers, at most {_MAX:,}", got=divisor
                    )


_YARN = (
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "llama_4_scaling_beta",
)  # fmt: skip
_ORIGINAL = "original_max_position_embeddings"
_ROTATED = "partial_rotary_factor"
_DIVISORS = ("short_factor", "long_factor")
_FIELDS: dict[RopeType, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": ((), ()),
    "dynamic": ((), ()),
    "yarn": ((_ORIGINAL,), _YARN),
    "llama3": ((_ORIGINAL, "low_freq_factor", "high_freq_factor"), ()),
    "longrope": ((_ORIGINAL, *_DIVISORS), ("attention_factor",)),
    "ntk_alpha": (("alpha",), ()),
}


_MIN, _MAX = 1e-12, 10**12
"""Bounds far beyond all models: with them angles are finite in float32."""
_LEAST: dict[str, float] = {
    "factor": 1,
    "alpha": _MIN,
    "low_freq_factor": _MIN,
    _ORIGINAL: 2,  # rules divide by its logarithm
    **dict.fromkeys(("high_freq_factor", *_YARN), 0),
}
"""Field -> its lower bound."""
_UNUSED = {"ntk_alpha": frozenset({"beta_fast", "beta_slow", "mscale", "mscale_all_dim"})}
"""Fields of other rules that published folders have, and transformers does not read."""
_THETA = 10_000.0
_OF_ANY_RULE = {"rope_type", "type", "rope_theta", _ROTATED} | {
    _ORIGINAL,  # transformers writes it for every rule and reads it for two
    "finetuned",  # in the first models with yarn; not used
    "max_position_embeddings",  # Ministral 3; not used
}
ROPE_KEYS = _OF_ANY_RULE.union(["factor"], *(chain(*both) for both in _FIELDS.values()))
"""Keys of `rope_parameters` that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRule:
    """Rotary embedding as a `config.json` describes it."""

    theta: float
    """Base of the wavelengths."""
    scaling: RopeScaling | None
    """Scaling for long contexts."""
    rotated: float
    """Part of each head that is rotated (`partial_rotary_factor`)."""


def read_rope(
    raw: Mapping[str, Any],
    *,
    default: Mapping[str, object] = MappingProxyType({}),
    names: Mapping[str, str] = MappingProxyType({}),
) -> RopeRule:
    """Read the rotary embedding of a `config.json`, as transformers 4 or 5 writes it.

    The rule is `rope_scaling` if there is one, else `rope_parameters`. Its base precedes a `rope_theta`
    beside it, and the `original_max_position_embeddings` beside it precedes its own, as in transformers.

    Args:
        default: rule of the family, where config.json has none; its base and its part of a head also complete
            a rule that lacks them.
        names: rules that the family calls by another name.

    Raises:
        ModelError: an unsupported rule, an unknown key, or a number out of range.
    """
    parameters, scaling = (_rule(raw, name) for name in ("rope_parameters", "rope_scaling"))
    found, where = (scaling, "rope_scaling") if scaling else (parameters, "rope_parameters")
    theta = _number("rope_theta", _theta(raw, found, parameters, default=default.get("rope_theta", _THETA)))
    parts = (found.get(_ROTATED), raw.get(_ROTATED), default.get(_ROTATED), 1.0)
    rotated = _number(_ROTATED, next(part for part in parts if part is not None))
    if raw.get("rope_parameters") is None and not scaling:
        _check_outer_theta(raw, default)
        found = dict(default)
    rule = _kind(found, names)
    own = {"factor", *chain(*_FIELDS[rule])} if rule in _FIELDS else ROPE_KEYS
    unused = _UNUSED.get(rule, frozenset())
    foreign = sorted(key for key in found.keys() - own - unused - _OF_ANY_RULE if found[key] is not None)
    if foreign:
        options = " ".join(f"--ignore-key {where}.{key}" for key in foreign if key not in ROPE_KEYS)
        raise ModelError(
            f"Unsupported {where} of {rule}",
            got={key: found[key] for key in foreign},
            fix="docs/explanation/models.md names what is read."
            + (f" If the model does not need the rest, open the folder with {options}." if options else ""),
        )
    if rule == "default":
        _check_type(found, where)
        return RopeRule(theta=theta, scaling=None, rotated=rotated)
    given = {key: found[key] for key in own if found.get(key) is not None}
    if "truncate" in found:
        given["truncate"] = bool(found["truncate"])
    if _ORIGINAL in own:
        given[_ORIGINAL] = raw.get(_ORIGINAL) or given.get(_ORIGINAL) or raw.get("max_position_embeddings")
    if rule == "longrope":
        given = _with_divisors(given, raw, where)
    if "factor" not in given:
        raise ModelError(f"{where} of {rule} has no factor", fix="Add the factor of the trained model.")
    for name in given.keys() - {"truncate", *_DIVISORS}:
        _number(name, given[name])
    try:
        scaled = RopeScaling(rope_type=cast(RopeType, rule), **given)
    except ConfigError as error:
        raise ModelError(f"config.json describes no model that can be built: {error}") from error
    return RopeRule(theta=theta, scaling=scaled, rotated=rotated)


def _kind(found: Mapping[str, Any], names: Mapping[str, str]) -> str:  # Any: JSON
    """Return the kind of a rule; raise ModelError for an unknown one."""
    given = found.get("rope_type") or found.get("type") or "default"
    kind = names.get(given, given) if isinstance(given, str) else given
    if kind == "ntk_alpha" and not found.get("alpha"):
        kind = given  # without alpha it is the rule of the same name
    if kind not in ("default", *_FIELDS):
        raise ModelError("Unknown rope_type", got=kind, fix=nearest(str(kind), ["default", *_FIELDS]))
    return cast(str, kind)


def _check_type(found: Mapping[str, Any], where: str) -> None:  # Any: JSON
    """Raise ModelError for the fields of a rule that is not named: transformers reads none of them."""
    is_named = any(found.get(key) for key in ("rope_type", "type"))
    fields = sorted(key for key in found.keys() - _OF_ANY_RULE if found[key] is not None)
    if fields and not is_named:
        raise ModelError(f"{where} has no rope_type", got=", ".join(fields), fix="Name the rule.")


def _with_divisors(
    given: Mapping[str, Any], raw: Mapping[str, Any], where: str
) -> dict[str, Any]:  # Any: JSON
    """Return the fields of longrope, with the factor that follows from two lengths where it is not given."""
    divisors: dict[str, tuple[float, ...]] = {}
    for name in _DIVISORS:
        numbers = given.get(name)
        if not isinstance(numbers, list) or not all(map(is_number, numbers)):
            raise ModelError(f"{where} of longrope: {name} must be a list of numbers", got=numbers)
        divisors[name] = tuple(numbers)
    original, context = given[_ORIGINAL], raw.get("max_position_embeddings")
    ratio = _number("max_position_embeddings", context) / max(_number(_ORIGINAL, original), 1.0)
    return {"factor": max(ratio, 1.0), **given, **divisors}


def _check_outer_theta(raw: Mapping[str, Any], default: Mapping[str, object]) -> None:
    """Refuse a base outside of a family's own rule, which transformers drops."""
    theta = raw.get("rope_theta")
    if "rope_type" in default and theta not in (None, default.get("rope_theta")):
        raise ModelError(
            "rope_theta is outside of rope_parameters, where transformers does not read it",
            got=theta,
            fix="Write rope_parameters with the whole rule.",
        )


def _theta(
    raw: Mapping[str, Any],
    found: Mapping[str, Any],
    parameters: Mapping[str, Any],  # Any: JSON
    *,
    default: object,
) -> object:
    """Return the base that transformers takes.

    Raises:
        ModelError: the only base given is in `rope_parameters`, which transformers drops for `rope_scaling`.
    """
    given = found.get("rope_theta") or raw.get("rope_theta")
    dropped = parameters.get("rope_theta")
    if given is None and dropped not in (None, default):
        raise ModelError(
            "rope_scaling has no rope_theta, and transformers does not read the one of rope_parameters then",
            got=dropped,
            fix=f'Write "rope_theta": {dropped} into rope_scaling.',
        )
    return default if given is None else given


def _rule(raw: Mapping[str, Any], key: str) -> dict[str, Any]:  # Any: JSON
    """Return a copy of the rule under one of the two keys; raise ModelError unless it is one for all
    layers."""
    given = {} if raw.get(key) is None else raw[key]
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ModelError(f"{key} must be one rule for all layers", got=given, fix="Use a model that has one.")
    return dict(given)


def _number(name: str, value: object) -> float:
    """Return the value as a float; raise ModelError unless it is finite and not negative."""
    if not is_number(value) or not 0 <= value <= sys.float_info.max:  # type: ignore[operator]
        fix = "Take config.json from where the weights came from."
        raise ModelError(f"{name} of the rotary embedding must be a number, 0 or more", got=value, fix=fix)
    return float(value)  # type: ignore[arg-type]


def write_rope(theta: float, scaling: RopeScaling | None, *, rotated: float | None) -> dict[str, Any]:
    """Return the keys of `config.json` in both spellings, so that transformers 4 and 5 read it.

    Args:
        rotated: part of each head that is rotated; None: the family rotates whole heads or none.
    """
    rule: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        given = {name: value for name, value in asdict(scaling).items() if value is not None}
        rule = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    part = {} if rotated is None else {_ROTATED: rotated}
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else rule,
        "rope_parameters": {"rope_theta": theta, **part, **rule},
        **part,
    }
