"""Checks of settings: numbers of the right kind and range, texts, tables, divisibility.

numpy's numbers are accepted. Booleans are not, although Python counts them as integers: a boolean in place of
a number is a mistake.
"""

import operator
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, SupportsFloat

from penstock.core.errors import ConfigError, UsageError


def is_number(value: object) -> bool:
    """Return True for a real number, nan and infinities included.

    >>> is_number(0.5), is_number("0.5"), is_number(True)
    (True, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Return True for a number of an integer type.

    >>> is_whole(2), is_whole(2.0), is_whole(True)
    (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_number(name: str, value: object, low: float, high: float = float("inf"), *, fix: str) -> None:
    """Refuse a value that is not a finite number in [low, high]."""
    if not is_number(value) or not (low <= value < float("inf") and value <= high):  # type: ignore[operator]
        _refuse(name, value, low, high, fix=fix)


def check_whole(name: str, value: object, low: int, high: float = float("inf"), *, fix: str) -> None:
    """Refuse a value that is not a whole number in [low, high]."""
    if not is_whole(value):
        raise UsageError(f"{name} must be a whole number", got=value, fix=fix)
    check_number(name, value, low, high, fix=fix)


MAX_SECONDS = 10 * 365 * 86_400
"""Limit of times, ten years: the system's own timers end at 2**63 ns, and some are told a multiple."""


def check_seconds(name: str, value: float, *, least: float = 0.0, zero: str = "") -> None:
    """Refuse a time in seconds that is not positive, is below `least`, or is above ten years.

    Args:
        zero: what 0 means; empty: 0 is refused.
    """
    if not ((0 < value <= MAX_SECONDS and value >= least) or (zero and value == 0)):
        low = f"at least {least:g}" if least else "0 or more" if zero else "above 0"
        raise ConfigError(
            f"{name} must be {low}, and at most {MAX_SECONDS:,} s (ten years)",
            got=value,
            fix=f"0 means {zero}." if zero else "",
        )


def _refuse(name: str, value: object, low: float, high: float, *, fix: str) -> None:
    limits = f"at least {low}" if high == float("inf") else f"from {low} to {high}"
    raise UsageError(f"{name} must be {limits}", got=value, fix=fix)


def at_least(least: int, name: str, value: int, *, most: int | None = None) -> int:
    """Return an integer of any type as a Python int, which JSON can write; refuse one out of range."""
    whole = whole_number(name, value)
    if whole < least:
        raise ConfigError(f"{name} must be at least {least}", got=whole)
    if most is not None and whole > most:
        raise ConfigError(f"{name} can be at most {most:,}", got=whole)
    return whole


def whole_number(name: str, value: int) -> int:
    """Return an integer of any type as a Python int."""
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be a whole number", got=value) from None


def number(name: str, value: object) -> float:
    """Return a number of any type as a Python float, which JSON can write."""
    try:
        if isinstance(value, SupportsFloat):  # a string is not
            return float(value)
    except (TypeError, OverflowError):
        pass  # an array of several values, or an integer beyond any float
    raise ConfigError(f"{name} must be a number", got=value)


def check_text(name: str, value: str) -> str:
    """Return a string; a state with anything else could not be read again."""
    if not isinstance(value, str):
        raise UsageError(f"{name} must be text", got=value)
    return value


def check_table(name: str, value: Mapping[str, Any], *, example: str) -> dict[str, Any]:  # Any: their own
    """Return a copy of a mapping from names; refuse any other type."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must map names of corpora to numbers", got=value, fix=f"Write {example}.")
    return dict(value)


def check_divisible(global_batch_size: int, *, world_size: int) -> None:
    """Refuse a global batch size that is not divisible by the number of ranks.

    Raises:
        ConfigError: the message names the nearest divisible sizes; or there are no ranks.
    """
    if world_size < 1:
        raise ConfigError("The number of ranks must be at least 1", got=world_size)
    if global_batch_size % world_size:
        lower = global_batch_size // world_size * world_size
        choices = " or ".join(str(size) for size in (lower, lower + world_size) if size)
        raise ConfigError(
            f"A global batch of {global_batch_size} sequences does not divide over {world_size} ranks",
            fix=f"Use a global batch of {choices}, or another number of ranks.",
        )
