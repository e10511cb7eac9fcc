"""Whether a setting is a number, and in its range: for callers whose types nobody checked.

Numbers of numpy are numbers. Truth values are not, though Python counts with them: who writes one where a
number belongs means something else.
"""

from numbers import Integral, Real

from penstock.core.errors import UsageError


def is_number(value: object) -> bool:
    """Whether it is a real number, nan and the infinite included.

    >>> is_number(0.5), is_number("0.5"), is_number(True)
    (True, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Whether it is a number of a kind that has no fractions.

    >>> is_whole(2), is_whole(2.0), is_whole(True)
    (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_number(name: str, value: object, low: float, high: float = float("inf"), *, fix: str) -> None:
    """Refuse what is no number in [low, high], or not finite; nan is inside no range."""
    if not is_number(value) or not (low <= value < float("inf") and value <= high):  # type: ignore[operator]
        _refuse(name, value, low, high, fix=fix)


def check_whole(name: str, value: object, low: int, high: float = float("inf"), *, fix: str) -> None:
    """Refuse what is no whole number in [low, high]."""
    if not is_whole(value):
        raise UsageError(f"{name} must be a whole number", got=value, fix=fix)
    check_number(name, value, low, high, fix=fix)


def _refuse(name: str, value: object, low: float, high: float, *, fix: str) -> None:
    limits = f"at least {low}" if high == float("inf") else f"from {low} to {high}"
    raise UsageError(f"{name} must be {limits}", got=value, fix=fix)
