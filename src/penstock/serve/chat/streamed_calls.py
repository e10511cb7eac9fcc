"""Tool calls parsed while their text is written; pure.

`StreamedCalls` finds where calls begin and returns their arguments as pieces of JSON: arguments in JSON as
they are, Qwen3-Coder's parameters as the JSON that `tool_parsers.read_function` makes of them. The pieces of
a well-formed call, joined, are its arguments, wherever the text is cut.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.serve.chat.json_scan import is_object
from penstock.serve.chat.tool_parsers import (
    PARAMETER_END,
    Call,
    Tools,
    json_text,
    json_value,
    schema_of,
)

_LONGEST_BEGIN = 512
"""Characters before the arguments of a call, or before a parameter; the rest of a longer call comes at its
end."""
_BRACKET = re.compile(r'["\\{}\[\]\n]')
_PARAMETER = re.compile(r"\s*+(?:<parameter=([^>]*+)>(?:\n|(?=[^\n]))|</function>)")


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New text of a tool call."""

    arguments: str
    name: str | None = None
    """Function name, if a new call begins; None: continues the last call."""


class StreamedCalls:
    """Incremental parser of the calls in one text.

    Args:
        first, following: as in `tool_parsers.Form`.
    """

    def __init__(self, tools: Tools, first: re.Pattern[str], following: re.Pattern[str]) -> None:
        self._tools = tools
        self._begin = first
        self._following = following
        self._at = 0  # where the next call begins
        self._name = ""
        self._arguments: _JsonArguments | _Parameters | None = None
        self._told: list[str] = []  # what was returned of the last call's arguments
        self._is_lost = False
        self.num_begun = 0
        self.whole: list[CallDelta] = []
        """Complete calls."""
        self.end = 0
        """End of the last call's arguments, malformed ones included."""
        self.whole_end = 0
        """End of the arguments of the last call in `whole`."""

    @property
    def is_open(self) -> bool:
        """True while arguments are incomplete."""
        return self._arguments is not None

    @property
    def begun(self) -> CallDelta:
        """The last call with its arguments so far."""
        return CallDelta("".join(self._told), self._name)

    @property
    def is_in_string(self) -> bool:
        """True if the text so far ends within a string of JSON arguments: a marker there is part of it."""
        return isinstance(self._arguments, _JsonArguments) and self._arguments.is_in_string

    def push(self, text: str) -> tuple[CallDelta, ...]:
        """Return what is new in `text`, which must begin with the text of the last call."""
        found: list[CallDelta] = []
        while not self._is_lost:
            begins = self._arguments is None
            self._arguments = self._arguments or self._begins(text)
            if self._arguments is None:
                break
            new, end = self._arguments.push(text)
            if begins or new:
                self._told.append(new)
                found.append(CallDelta(new, self._name if begins else None))
            if end is None:
                break
            self._arguments, self._at, self.end = None, end, end
            self._is_lost = not is_object(self.begun.arguments)
            if not self._is_lost:
                self.whole.append(self.begun)
                self.whole_end = end
        return tuple(found)

    def rest(self, calls: tuple[Call, ...]) -> tuple[CallDelta, ...]:
        """Return what was not returned yet of complete calls, parsed from the whole text."""
        told = "".join(self._told)
        begun = calls[self.num_begun - 1 : self.num_begun] if self.is_open else ()
        return (
            *(CallDelta(call.arguments[len(told) :]) for call in begun if call.arguments.startswith(told)),
            *(CallDelta(call.arguments, call.name) for call in calls[self.num_begun :]),
        )

    def _begins(self, text: str) -> "_JsonArguments | _Parameters | None":
        """Find the next call of a known tool and the start of its arguments."""
        match = self._begin.match(text, self._at)
        name = "" if match is None else match[match.lastindex or 0].strip()
        if match is None or name not in self._tools:
            self._is_lost = match is not None or len(text) - self._at > _LONGEST_BEGIN
            return None
        self._name, self._told, self._begin = name, [], self._following
        self.num_begun += 1
        if text[match.end()] == "{":
            return _JsonArguments(at=match.end())
        return _Parameters(self._tools[name], at=match.end())


class _JsonArguments:
    """Arguments in JSON, returned as they are written.

    Args:
        at: index in the text where they begin.
    """

    def __init__(self, *, at: int) -> None:
        self._at = at  # parsed up to here
        self._depth = 0
        self._in_text = False
        self._is_broken = False

    @property
    def is_in_string(self) -> bool:
        """True within a string."""
        return self._in_text and not self._is_broken

    def push(self, text: str) -> tuple[str, int | None]:
        """Return what is new, and the end of the arguments, or None."""
        begin = self._at
        end = self._end(text)
        return text[begin : self._at], end

    def _end(self, text: str) -> int | None:
        while match := _BRACKET.search(text, self._at):
            letter = match[0]
            if letter == "\\" and self._in_text:
                if match.end() == len(text):  # the escaped character is still missing
                    self._at = match.start()
                    return None
                self._at = match.end() + 1
                continue
            self._at = match.end()
            if letter == "\n":
                self._is_broken = True  # JSON has no line breaks in strings: this one lacks its end
            elif letter == '"':
                self._in_text, self._is_broken = not self._in_text, False
            elif not self._in_text and letter != "\\":
                self._depth += 1 if letter in "{[" else -1
                if self._depth == 0:
                    return self._at
        self._at = len(text)
        return None


class _Parameters:
    """Arguments as `<parameter=KEY>` and values; a string is returned as it is written, other values whole.

    Args:
        tool: JSON schema of the arguments.
        at: index in the text where they begin.
    """

    def __init__(self, tool: Mapping[str, Any], *, at: int) -> None:
        self._tool = tool
        self._at = at  # parsed up to here
        self._begin = 0  # of the open value
        self._schema: Mapping[str, Any] | None = None  # of the open value
        self._keys: set[str] = set()

    def push(self, text: str) -> tuple[str, int | None]:
        """Return the JSON that is new, and the end of the arguments, or None."""
        new = ""
        while True:
            if self._schema is None:
                match = _PARAMETER.match(text, self._at)
                key = None if match is None or match[1] is None else match[1].strip()
                if key in self._keys or (match is None and len(text) - self._at > _LONGEST_BEGIN):
                    self._at = sys.maxsize  # malformed: nothing matches any more
                    return new, None
                if match is None:
                    return new, None
                if key is None:
                    return new + ("}" if self._keys else "{}"), match.end()
                new += f"{', ' if self._keys else '{'}{json_text(key)}: "
                self._keys.add(key)
                self._schema = schema_of(key, self._tool)
                self._at = self._begin = match.end()
                new += '"' if self._schema.get("type") == "string" else ""
            is_string = self._schema.get("type") == "string"
            end = text.find(PARAMETER_END, self._at)
            if end < 0:
                keep = max(overlap(text, PARAMETER_END), overlap(text, "\n" + PARAMETER_END))
                until = max(self._at, len(text) - keep)
                new += json_text(text[self._at : until])[1:-1] if is_string else ""
                self._at = until
                return new, None
            if is_string:
                new += json_text(text[self._at : end].removesuffix("\n"))[1:]
            else:
                new += json_value(text[self._begin : end].removesuffix("\n"), self._schema)
            self._at, self._schema = end + len(PARAMETER_END), None


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a marker."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(mark[:n])), 0)
