"""Calls of tools in what a model writes: found while the text streams; pure.

Models were taught several ways to write a call. Two cover most: JSON between `<tool_call>` and
`</tool_call>` (Hermes, Qwen, Granite 4), and an answer that is nothing but JSON, one object or a list of them
(Llama 3, and Mistral and Granite 3, whose opening mark is a special token that is not part of the text). An
object names the function in "name" and has "arguments" or "parameters". What turns out not to be a call of a
known tool is text after all: nothing that the model wrote is lost.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Call:
    """A function to call."""

    name: str
    arguments: str
    """JSON of an object."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a piece of text added: words, then calls."""

    content: str = ""
    calls: tuple[Call, ...] = ()


class ToolReader:
    """Splits one answer into words and calls.

    Args:
        names: of the tools that were offered.

    >>> reader = ToolReader({"add"})
    >>> reader.push('Sure. <tool_ca'), reader.push('ll>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    (Said(content='Sure. ', calls=()), Said(content='', calls=(Call(name='add', arguments='{"a": 1}'),)))
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._is_first = True
        self._after_call = False

    def push(self, text: str) -> Said:
        """Take text; return what is now certain."""
        self._held += text
        if self._is_first:
            begin = self._held.lstrip()
            if not begin or begin[0] in "{[":  # JSON and nothing else, perhaps: known at the end
                return Said()
            self._is_first = False
        content = ""
        calls: list[Call] = []
        while True:
            if self._after_call:  # a newline there parts calls and is no word
                self._held = self._held.lstrip("\n")
                self._after_call = not self._held
            words, mark, rest = self._held.partition(OPEN)
            if not mark:
                keep = _overlap(self._held, OPEN)
                self._held, words = self._held[len(self._held) - keep :], self._held[: len(self._held) - keep]
                return Said(content + words, tuple(calls))
            inner, mark, after = rest.partition(CLOSE)
            if not mark:
                self._held = OPEN + rest
                return Said(content + words, tuple(calls))
            found = read_calls(inner, self._names)
            content += words if found else words + OPEN + inner + CLOSE
            calls += found
            self._held, self._after_call = after, bool(found)

    def close(self) -> Said:
        """Return what was held back, read as well as it can be."""
        held, self._held = self._held, ""
        calls = read_calls(held.strip().removeprefix(OPEN), self._names)
        return Said(calls=calls) if calls else Said(content=held)


def read_calls(text: str, names: Collection[str]) -> tuple[Call, ...]:
    """Return the calls that JSON text describes; none where it is anything else.

    >>> read_calls('[{"name": "f", "parameters": {"x": 1}}]', {"f"})
    (Call(name='f', arguments='{"x": 1}'),)
    >>> read_calls('{"name": "g", "arguments": {}}', {"f"})
    ()
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    calls = tuple(_call_of(entry, names) for entry in (found if isinstance(found, list) else [found]))
    return tuple(call for call in calls if call is not None) if None not in calls else ()


def _call_of(entry: object, names: Collection[str]) -> Call | None:
    if not isinstance(entry, dict) or entry.get("name") not in names:
        return None
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if isinstance(arguments, str):  # JSON in JSON, as some models write it
        return Call(entry["name"], arguments)
    if not isinstance(arguments, dict):
        return None
    return Call(entry["name"], json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str, mark: str) -> int:
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(mark[:n])), 0)
