"""Configuration from frozen dataclasses: read TOML, override by dotted path, check, dump, fingerprint.

One rule for every recipe: a key is a dataclass field, a section is a nested dataclass, and a table of
sections is a `dict[str, Section]`. Unknown keys and wrong types are errors that name the key, the value and
the nearest known key; nothing is coerced except an int where a float is expected.
"""

import dataclasses
import hashlib
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from penstock.core.dtypes import choice_of
from penstock.core.errors import ConfigError, UsageError, nearest

T = TypeVar("T")
Raw = dict[str, Any]  # Any: what TOML holds before it is checked

INFINITE = {"infinite": True}
"""Metadata of a float field that may be infinite; all others must be finite, and none may be nan."""

_QUOTED = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*')"""
"""Pattern of a name in quotes."""
_ITEM = re.compile(rf"\s*({_QUOTED}[^,]*|[^,]*),")
_LARGEST = 2**62  # steps and samples are counted in int64
_SEGMENT = re.compile(rf"""\s*({_QUOTED}|[^.="']*?)\s*([.=]|$)""")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class UnknownKey(ConfigError):
    """Key that its section does not have."""

    def __init__(self, key: str, *, hint: str) -> None:
        super().__init__(f"Unknown key {key}", fix=hint)
        self.key = key
        """Dotted path of the key, sections included."""


def load_toml(path: Path, *, what: str = "Recipe") -> Raw:
    """Read a TOML file.

    Args:
        what: what the file is, for messages.

    Raises:
        UsageError: the file is missing or is a folder.
        ConfigError: it is not valid TOML; the message contains the line.
    """
    if path.is_dir():
        raise UsageError(f"{what} {path} is a folder", fix="Give the path of a .toml file.")
    if not path.exists():  # a pipe is accepted too, such as a shell's <(penstock recipes show ...)
        raise UsageError(
            f"{what} {path} does not exist",
            fix="Give the path of a .toml file; `penstock recipes show NAME > mine.toml` makes one."
            if what == "Recipe"
            else "Give the path of a .toml file.",
        )
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:  # invalid TOML, bytes that are not text, an int of 5,000 digits
        raise ConfigError(f"{path} is not valid TOML: {error}", fix="Correct that line.") from None


def load_json(path: Path) -> Raw:
    """Read a JSON object from a file.

    Raises:
        ConfigError: the file does not contain a JSON object.
    """
    return parse_json(path.read_bytes(), name=str(path))


def parse_json(content: bytes, *, name: str) -> Raw:
    """Return the JSON object that a file has.

    Raises:
        ConfigError: the content is no JSON object.
    """
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must contain a JSON object", got=type(value).__name__)
    return value


def override(raw: Raw, settings: Sequence[str]) -> Raw:
    """Return `raw` with `a.b=value` settings applied; a value is parsed as TOML, else kept as a string.

    >>> override({"optim": {"lr": 0.1}}, ["optim.lr=0.2", "run.dir=runs/x"])
    {'optim': {'lr': 0.2}, 'run': {'dir': 'runs/x'}}
    """
    result: Raw = json.loads(json.dumps(raw, default=str))
    for setting in settings:
        (*sections, last), text = _split(setting)
        node = result
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{section} in --set {setting} is a value, not a section", got=node)
        node[last] = _toml_value(text)
    return result


def _split(setting: str) -> tuple[list[str], str]:
    """Split `a."b.c"=value` into the segments of its key, by TOML's rules, and the text of the value.

    >>> _split('data."my.web".path=c=1')
    (['data', 'my.web', 'path'], 'c=1')
    """
    segments, at, separator = [], 0, "."
    while separator == ".":
        match = _SEGMENT.match(setting, at)
        if match is None or match[2] == "":
            raise UsageError(
                "--set takes section.key=value", got=setting, fix="Example: --set run.steps=100."
            )
        segments.append(match[1])
        at, separator = match.end(), match[2]
    if segments == [""]:
        raise UsageError("--set takes section.key=value", got=setting, fix="Example: --set run.steps=100.")
    if "" in segments:
        raise UsageError(
            "A key in --set has an empty segment between its dots",
            got=setting,
            fix="Example: --set run.steps=100.",
        )
    text = setting[at:].strip()
    if "\n" in text or "\r" in text:
        raise UsageError(
            "A value in --set must be one line", got=setting, fix="Give each setting a --set of its own."
        )
    return [unquoted(segment) for segment in segments], text


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text


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


def _names(kind: Any) -> set[str]:  # Any: a type of any form
    return {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()


def build(cls: type[T], raw: Mapping[str, Any], *, where: str = "") -> T:
    """Build a config dataclass from plain values, checking every key and type.

    Args:
        where: dotted path of this section, for messages.

    Raises:
        ConfigError: an unknown or missing key, a wrong type, or a value that the class refuses.
    """
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    for name in raw:
        if name not in fields:
            below = [f"{section}.{name}" for section, kind in hints.items() if name in _names(kind)]
            hint = f"Did you mean {' or '.join(map(repr, below))}?" if below else nearest(name, list(fields))
            raise UnknownKey(f"{prefix}{name}", hint=hint)
    missing = [n for n, f in fields.items() if n not in raw and _required(f)]
    if missing:
        raise ConfigError(
            f"Missing key {prefix}{missing[0]}", fix=f"Add it to {f'[{where}]' if where else 'the recipe'}."
        )
    return cls(
        **{
            name: _check(
                value,
                hints[name],
                where=f"{prefix}{name}",
                infinite=fields[name].metadata.get("infinite", False),
            )
            for name, value in raw.items()
        }
    )


def _required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _check(value: Any, hint: Any, *, where: str, infinite: bool = False) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        options = [arg for arg in args if arg is not type(None)]
        fitting = [arg for arg in options if _fits(value, arg)]
        return _check(value, (fitting or options)[0], where=where, infinite=infinite)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(typing.cast(type[Any], hint), value, where=where)
    if origin is dict and isinstance(value, Mapping):
        return {k: _check(v, args[1], where=f"{where}.{k}") for k, v in value.items()}
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        if len(kinds) == len(value):
            return tuple(
                _check(v, k, where=f"{where}[{i}]") for i, (v, k) in enumerate(zip(value, kinds, strict=True))
            )
    if origin is typing.Literal:
        if isinstance(value, str):
            value = choice_of(value, args)
        if value in args:
            return value
        raise ConfigError(
            f"{where} has no such choice", got=value, fix=nearest(str(value), [str(a) for a in args])
        )
    return _check_plain(value, hint, where=where, infinite=infinite)


def _check_plain(value: Any, hint: Any, *, where: str, infinite: bool) -> Any:
    if not _fits(value, hint):
        quotable = hint is str and isinstance(value, int | float)
        fix = "Write it in quotes." if quotable else "Correct its type."
        raise ConfigError(f"{where} must be {_in_words(hint)}", got=value, fix=fix)
    if hint is str and "\0" in value:
        raise ConfigError(f"{where} contains the character NUL", got=value, fix="Remove \\u0000.")
    return _number(value, hint, where=where, infinite=infinite) if hint in (int, float) else value


def _number(value: Any, hint: Any, *, where: str, infinite: bool) -> Any:
    """Refuse numbers that later arithmetic cannot represent."""
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ConfigError(f"{where} must be from -2**62 to 2**62", got=_shortened(value))
    if hint is float and not (math.isfinite(value) or (infinite and not math.isnan(value))):
        raise ConfigError(f"{where} must be a {'' if infinite else 'finite '}number", got=value)
    return float(value) if hint is float else value


def _shortened(value: int) -> str:
    return f"{value:.3e}" if abs(value) < 10**300 else f"a number of {value.bit_length()} bits"


def _in_words(hint: Any) -> str:
    """Return the name of a type for users, instead of the class name.

    >>> _in_words(tuple[int, ...])
    'a list (each a whole number)'
    """
    origin, args = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return "a section"
    if origin is dict:
        return "a table of sections" if dataclasses.is_dataclass(args[1]) else "a table"
    if origin is tuple and args[-1] is Ellipsis:
        return f"a list (each {_in_words(args[0])})"
    if origin is tuple:
        return f"a list of {len(args)} ({', '.join(map(_in_words, args))})"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    if dataclasses.is_dataclass(hint):
        return isinstance(value, Mapping)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(hint, type) and isinstance(value, hint)


def dump(config: Any) -> Raw:
    """Return a config as plain values that `build` reads back to an equal config."""
    values: Raw = json.loads(json.dumps(dataclasses.asdict(config)))
    return values


def fingerprint(values: Any) -> str:
    """Return 16 hex digits that identify plain values, whatever the order of their keys."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
