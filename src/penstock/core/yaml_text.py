"""YAML writer: plain values to YAML text, for objects of Kubernetes that people read and `kubectl` takes."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_/][\w./-]*([ =,@+:][\w./-]+)*", re.ASCII)
"""Text without a meaning of its own in YAML; checked against `_WORDS`."""
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def yaml_text(values: Mapping[str, Any]) -> str:  # Any: JSON values
    """Return a YAML document; texts of several lines are literal blocks.

    >>> print(yaml_text({"kind": "Pod", "spec": {"args": ["a", "1"], "on": True, "a": "x\\ny\\n"}}), end="")
    kind: Pod
    spec:
      args:
      - a
      - "1"
      "on": true
      a: |
        x
        y
    """
    return "".join(f"{line}\n" for line in _mapping(values))


def _mapping(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        head = f"{_scalar(name)}:"
        if isinstance(value, Mapping) and value:
            yield head
            yield from (f"  {line}" for line in _mapping(value))
        elif isinstance(value, list | tuple) and value:
            yield head
            yield from _sequence(value)
        elif isinstance(value, str) and _is_block(value):
            yield f"{head} |{'' if value.endswith(chr(10)) else '-'}"
            yield from (f"  {line}".rstrip() for line in value.removesuffix("\n").split("\n"))
        else:
            yield f"{head} {_scalar(value)}"


def _sequence(values: Sequence[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, Mapping | list | tuple) and value:
            first, *rest = _mapping(value) if isinstance(value, Mapping) else _sequence(value)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
        else:
            yield f"- {_scalar(value)}"


def _is_block(text: str) -> bool:
    """Return True if a literal block holds the text unchanged."""
    lines = text.removesuffix("\n").split("\n")
    is_plain = all(line.isprintable() and line == line.rstrip() for line in lines)
    return len(lines) > 1 and is_plain and lines[0][:1] not in ("", " ") and lines[-1] != ""


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    if value == [] or value == {} or not isinstance(value, str):
        return json.dumps(value)
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in quoted)
