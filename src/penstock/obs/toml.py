"""Write plain values as TOML text, so that a recipe shown is a recipe to copy."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any


def toml_text(values: Mapping[str, Any]) -> str:  # Any: JSON values
    """Return a TOML document; keys without a value (None) are left out, for TOML has no null.

    >>> print(toml_text({"compute": "float32", "run": {"steps": 60, "seed": None}}))
    compute = "float32"
    <BLANKLINE>
    [run]
    steps = 60
    """
    return "\n".join(_table(values, ())).strip()


def _table(values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    plain = {key: v for key, v in values.items() if v is not None and not isinstance(v, Mapping)}
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    if path and (plain or not tables):
        yield ""
        yield f"[{'.'.join(_key(part) for part in path)}]"
    for key, value in plain.items():
        yield f"{_key(key)} = {_value(value)}"
    for key, value in tables.items():
        yield from _table(value, (*path, key))


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value if item is not None)}]"
    if isinstance(value, Mapping):
        pairs = (f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
        return f"{{ {', '.join(pairs)} }}"
    return repr(value) if isinstance(value, int | float) else _text(str(value))


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
