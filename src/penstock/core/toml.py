"""TOML text of plain values, so that a recipe that is shown can be copied."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

Changes = dict[str, tuple[Any, Any]]  # Any: JSON values
"""Path of a setting -> (value before, value now); None: missing."""


def toml_text(values: Mapping[str, Any]) -> str:  # Any: JSON values
    """Return a TOML document; keys with the value None are left out, since TOML has no null.

    >>> print(toml_text({"compute": "float32", "run": {"steps": 60, "seed": None}}))
    compute = "float32"
    <BLANKLINE>
    [run]
    steps = 60
    """
    return "\n".join(_table(values, ())).strip()


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting of a recipe with its dotted path.

    >>> dict(flat({"run": {"steps": 60, "seed": None}, "compute": "float32"}))
    {'run.steps': 60, 'run.seed': None, 'compute': 'float32'}
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Return the settings in which two recipes differ.

    >>> differences({"optim": {"learning_rate": 0.1}}, {"optim": {"learning_rate": 0.05}, "plan": ""})
    {'optim.learning_rate': (0.1, 0.05), 'plan': (None, '')}
    """
    old, new = dict(flat(before)), dict(flat(now))
    names = dict.fromkeys([*old, *new])
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


def plain(value: Any) -> str:
    """Return one setting as text for people, as in a recipe; strings without quotes, a dash for None.

    >>> plain(True), plain(None), plain("bfloat16"), plain([1, "a"])
    ('true', '\u2013', 'bfloat16', '[1, "a"]')
    """
    if value is None:
        return "\u2013"
    return value if isinstance(value, str) else _value(value)


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
