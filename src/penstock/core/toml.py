"""TOML text of plain values, so that a recipe that is shown can be copied; and names in TOML's quotes."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.core.errors import UsageError

Changes = dict[str, tuple[Any, Any]]  # Any: JSON values
"""Path of a setting -> (value before, value now); None: missing."""

QUOTED = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*')"""
"""Pattern of a name in quotes."""
_ITEM = re.compile(rf"\s*({QUOTED}[^,]*|[^,]*),")


def unquoted(name: str) -> str:
    """Return a name, without its quotes if it is in quotes.

    Raises:
        UsageError: the quotes are not TOML's.

    >>> unquoted('web'), unquoted('"a,b"'), unquoted("'a.b'")
    ('web', 'a,b', 'a.b')
    """
    if name[:1] not in ("'", '"'):
        return name
    try:
        return str(tomllib.loads(f"name = {name}")["name"])
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"A name in quotes is not valid TOML: {error}", got=name) from None


def comma_separated(text: str) -> list[str]:
    """Return the items of a list with commas between; an item may begin with a name in quotes.

    >>> comma_separated('web=0.2, "a,b"=0.5')
    ['web=0.2', '"a,b"=0.5']
    """
    return [item.strip() for item in _ITEM.findall(f"{text},")]


def listed_names(text: str) -> list[str]:
    """Return the names of a list with commas between, without their quotes; empty items are left out.

    Raises:
        UsageError: the quotes of one are not TOML's.

    >>> listed_names('loss, "corpus_tokens/a,b",')
    ['loss', 'corpus_tokens/a,b']
    """
    return [unquoted(item) for item in comma_separated(text) if item]


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
