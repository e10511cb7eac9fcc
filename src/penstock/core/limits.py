"""Limits of a dataclass's fields, written on the fields: checked when it is made, and read by descriptions.

@dataclass(frozen=True, kw_only=True)
class Pod:
    memory: str = limited(Limit(pattern=r"[0-9]+Gi", fix="Example: 64Gi."), "")

    def __post_init__(self) -> None:
        check_limits(self)
"""

import re
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from penstock.core.errors import PenstockError, UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Allowed values of a field. For a collection, of each entry; for a table of pairs, of each key."""

    pattern: str = ""
    """Regular expression of the whole text, in the syntax that Python and RE2 share. The field's default is
    not held to it: text that is empty by default is unset."""
    longest: int = 0
    """Most characters; 0: any number."""
    least: float | None = None
    most: float | None = None
    says: str = ""
    """Kind of value, as messages name it after "takes", such as "a Kubernetes quantity"."""
    fix: str = ""
    option: str = ""
    """Name in messages; empty: the field's, without a unit of seconds."""


def limited(limit: Limit, default: Any = MISSING) -> Any:  # Any: as dataclasses.field
    """Return a field with a limit."""
    return field(default=default, metadata={"limit": limit})


def limit_of(one: Field[Any]) -> Limit | None:
    """Return the limit of a field."""
    return one.metadata.get("limit")


def check_limits(
    value: "DataclassInstance", *, named: str = "--{}", error: type[PenstockError] = UsageError
) -> None:
    """Refuse a dataclass with a field beyond its limit.

    Args:
        named: name of a field in messages; `{}` stands for the field's, with - for _.
        error: what is raised.

    Raises:
        PenstockError: the message has the field and its value.
    """
    for one in fields(value):
        limit = limit_of(one)
        found = getattr(value, one.name)
        if limit is None or found == one.default:
            continue
        for entry in _entries(found):
            if not _is_within(entry, limit):
                name = named.format(limit.option or one.name.removesuffix("_s").replace("_", "-"))
                raise error(f"{name} {_said(limit)}", got=entry, fix=limit.fix)


def _entries(value: Any) -> Iterable[Any]:  # Any: of a field
    if value is None:
        return ()
    if isinstance(value, dict):
        return value.keys()
    if isinstance(value, tuple):
        return [one[0] if isinstance(one, tuple) else one for one in value]
    return (value,)


def _is_within(entry: Any, limit: Limit) -> bool:  # Any: as above
    if isinstance(entry, str):
        is_short = not limit.longest or len(entry) <= limit.longest
        return is_short and (not limit.pattern or re.fullmatch(limit.pattern, entry) is not None)
    return (limit.least is None or entry >= limit.least) and (limit.most is None or entry <= limit.most)


def _said(limit: Limit) -> str:
    if limit.says:
        return f"takes {limit.says}"
    if limit.most is None:
        return f"must be at least {limit.least:g}"
    return f"must be from {limit.least:g} to {limit.most:,.10g}"
