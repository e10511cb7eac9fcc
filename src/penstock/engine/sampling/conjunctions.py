"""Number of patterns that a JSON schema combines for one text; pure.

The grammar library intersects the patterns of one text one after the other. 16 take 0.2 s. 32 take more than
20 s and 100 MB, in a thread that nothing stops.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Schema = Any
"""A JSON schema: an object, True or False."""
MAX_PATTERNS = 16
"""Patterns of one text."""
_MAX_SCHEMAS = 200_000
"""Schemas of all conjunctions together: recursive references combine the combinations."""


def combines_too_many(schema: Schema, at: Callable[[str], Schema]) -> bool:
    """Return whether a text must match more than MAX_PATTERNS patterns, or too many schemas to count them.

    Args:
        at: returns what a pointer such as #/$defs/a names; raises LookupError, ValueError or TypeError.

    >>> combines_too_many({"allOf": [{"pattern": f"a{i}"} for i in range(17)]}, {}.__getitem__)
    True
    """
    seen: set[frozenset[int]] = set()
    num_schemas = 0
    waiting: list[list[Schema]] = [[schema]]
    while waiting:
        whole = _flattened(waiting.pop(), at)
        num_schemas += len(whole)
        key = frozenset(map(id, whole))
        if key in seen:
            continue
        seen.add(key)
        if num_schemas > _MAX_SCHEMAS or sum("pattern" in one for one in whole) > MAX_PATTERNS:
            return True
        children: defaultdict[tuple[str, str], list[Schema]] = defaultdict(list)
        for one in whole:
            for name, part in _children(one):
                children[name].append(part)
        waiting += children.values()
    return False


def _flattened(schemas: Sequence[Schema], at: Callable[[str], Schema]) -> list[dict[str, Any]]:
    """Return the schemas that a value must match if it matches all of these."""
    found: dict[int, dict[str, Any]] = {}
    waiting = list(schemas)
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict) or id(one) in found:
            continue
        found[id(one)] = one
        parts = one.get("allOf")
        waiting += parts if isinstance(parts, list) else []
        if isinstance(pointer := one.get("$ref"), str) and pointer.startswith("#"):
            try:
                waiting.append(at(pointer))
            except (LookupError, ValueError, TypeError):
                continue
    return list(found.values())


def _children(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, str], Schema]]:
    """Yield the schemas of a value's parts: equal names are of the same part."""
    for keyword in ("properties", "patternProperties"):
        if isinstance(parts := schema.get(keyword), dict):
            yield from (((keyword, name), part) for name, part in parts.items())
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            yield (keyword, ""), schema[keyword]
    for keyword in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(parts := schema.get(keyword), list):
            yield from (((keyword, f"{id(schema)}/{index}"), part) for index, part in enumerate(parts))
