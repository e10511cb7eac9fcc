"""Tool calls: tools that a model may call, and calls parsed from the text it streams; pure.

A call is between the markers of one of `tool_parsers.FORMS`, or the whole answer is JSON, one object or a
list of them (Llama 3). Text that turns out not to be a call of a known tool is returned as text: nothing is
lost.

With `streams`, the arguments of a JSON call are returned as they are written, as soon as the tool's name is
certain. They cannot be taken back if what follows is malformed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.serve.chat.tool_parsers import FORMS, Call, Form, Tools, is_object, read_json
from penstock.serve.errors import ApiError
from penstock.serve.schema.base import ANY_JSON
from penstock.serve.schema.chat import AllowedChoice, NamedTool, Tool, ToolChoice

_CALL = r'\{\s*+"name"\s*+:\s*+"([^"\\]*+)"\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
_FIRST_CALL = re.compile(rf"\s*+\[?\s*+{_CALL}")
_NEXT_CALL = re.compile(rf"\s*+\}}\s*+,\s*+{_CALL}")
_LONGEST_BEGIN = 512
"""Characters of a call before its arguments; a longer call is returned whole, at its end."""
_BRACKET = re.compile(r'["\\{}\[\]]')


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New text of a tool call."""

    arguments: str
    name: str | None = None
    """Function name, if a new call begins; None: continues the last call."""


@dataclass(frozen=True, slots=True)
class Said:
    """New output of one answer, in this order: arguments of an open call, content, new calls."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class ToolReader:
    """Splits one answer into content and tool calls.

    Args:
        tools: offered tools.
        streams: return arguments as they are written; False: calls are returned whole.

    >>> reader = ToolReader({"add": {}})
    >>> reader.push('Sure. <tool_ca').content
    'Sure. '
    >>> reader.push('ll>{"name": "add", "arguments": {"a": 1}}</tool_call>').calls
    (CallDelta(arguments='{"a": 1}', name='add'),)
    """

    def __init__(self, tools: Tools, *, streams: bool = False) -> None:
        self._tools = tools
        self._streams = streams
        self._kind: Literal["unknown", "json", "text"] = "unknown"
        """Kind of answer, by its first characters."""
        self._held = ""  # text since the open marker, if there is one
        self._open: Form | None = None
        self._calls = _JsonCalls(tools, at=0)  # in what is held
        self._after_call = False

    def push(self, text: str) -> Said:
        """Add text; return the output that is certain now."""
        held, self._held = self._held, ""  # the only reference, so that += is in place
        num_seen = len(held)
        held += text
        if self._kind == "unknown":
            self._kind = _kind_of(held)
        if self._kind != "text":
            self._held = held
            return Said(calls=self._begun(held) if self._kind == "json" else ())
        content = ""
        calls: list[CallDelta] = []
        while True:
            if self._open is None:
                if self._after_call:  # newlines between calls are a separator
                    held = held.lstrip("\n")
                    self._after_call = not held
                form = _first_form(held)
                if form is None:
                    keep = max(_overlap(held, form.begin) for form in FORMS)
                    self._held, words = held[len(held) - keep :], held[: len(held) - keep]
                    return Said(content + words, tuple(calls))
                words, _, rest = held.partition(form.begin)
                content += words
                held, num_seen, self._open = form.begin + rest, 0, form
                self._calls = _JsonCalls(self._tools, at=len(form.begin))
            form = self._open
            begin = max(len(form.begin), num_seen - len(form.end) + 1)
            end = held.find(form.end, begin) if form.end else -1
            if end < 0:
                self._held = held
                return Said(content, (*calls, *self._begun(held)))
            said = self._ended(held[:end], form.end, is_cut=False)
            content += said.content
            calls += said.calls
            held, self._open, self._after_call = held[end + len(form.end) :], None, not said.content

    def close(self, *, is_cut: bool = False) -> Said:
        """Return what was held back, parsed as far as possible.

        Args:
            is_cut: True: the answer was cut off, so incomplete calls are text.
        """
        held, self._held = self._held, ""
        return self._ended(held, "", is_cut=is_cut)

    def _begun(self, held: str) -> tuple[CallDelta, ...]:
        return self._calls.push(held) if self._streams else ()

    def _ended(self, held: str, end: str, *, is_cut: bool) -> Said:
        """Return the rest of the open call format, or of an answer without one."""
        form, seen = self._open, self._calls
        new = seen.push(held)
        read = read_json if form is None else form.read
        inner = held if form is None else held[len(form.begin) :]
        calls = () if is_cut and form is not None and form.needs_end else read(inner, self._tools)
        if self._streams and seen.num_begun:
            later = [CallDelta(call.arguments, call.name) for call in calls[seen.num_begun :]]
            return Said("" if calls or seen.is_open else held[seen.end :] + end, (*new, *later))
        if calls:
            return Said(calls=seen.as_written(calls))
        if is_cut and seen.whole:  # completed before the cut
            return Said(held[seen.end :], tuple(seen.whole))
        return Said(held + end)


class _JsonCalls:
    """Incremental parser of tool calls in JSON: one object, or a list of them.

    Args:
        at: index in the text where the JSON begins.
    """

    def __init__(self, tools: Tools, *, at: int) -> None:
        self._tools = tools
        self._at = at  # parsed up to here
        self._begin = self._told = 0  # open arguments: where they begin, and how far they were returned
        self._depth = 0
        self._in_text = False
        self._name: str | None = None
        self._is_lost = False
        self.num_begun = 0
        self.whole: list[CallDelta] = []
        self.end = 0
        """End of the last complete call's arguments."""

    @property
    def is_open(self) -> bool:
        """True while arguments are incomplete."""
        return self._name is not None

    def push(self, text: str) -> tuple[CallDelta, ...]:
        """Return what is new in `text`, which must begin with the text of the last call."""
        found: list[CallDelta] = []
        while not self._is_lost:
            begun = self._name is None
            if self._name is None and not self._begins(text):
                break
            end = self._end_of_arguments(text)
            new = text[self._told : self._at]
            self._told = self._at
            if begun or new:
                found.append(CallDelta(new, self._name if begun else None))
            if end is None:
                break
            arguments = text[self._begin : end]
            self._is_lost = not is_object(arguments)
            if not self._is_lost:
                self.whole.append(CallDelta(arguments, self._name))
            self._name, self.end = None, end
        return tuple(found)

    def as_written(self, calls: tuple[Call, ...]) -> tuple[CallDelta, ...]:
        """Return complete calls, with the arguments as the model wrote them if these were parsed here."""
        if [call.name for call in calls] == [delta.name for delta in self.whole]:
            return tuple(self.whole)
        return tuple(CallDelta(call.arguments, call.name) for call in calls)

    def _begins(self, text: str) -> bool:
        """Find the next call of a known tool and the start of its arguments."""
        match = (_NEXT_CALL if self.num_begun else _FIRST_CALL).match(text, self._at)
        if match is None or match[1] not in self._tools:
            self._is_lost = match is not None or len(text) - self._at > _LONGEST_BEGIN
            return False
        self._name, self._at, self._depth, self._in_text = match[1], match.end(), 0, False
        self._begin = self._told = self._at
        self.num_begun += 1
        return True

    def _end_of_arguments(self, text: str) -> int | None:
        """Continue parsing; return the end of the open object, or None."""
        while match := _BRACKET.search(text, self._at):
            letter = match[0]
            if letter == "\\" and self._in_text:
                if match.end() == len(text):  # the escaped character is still missing
                    self._at = match.start()
                    return None
                self._at = match.end() + 1
                continue
            self._at = match.end()
            if letter == '"':
                self._in_text = not self._in_text
            elif not self._in_text and letter != "\\":
                self._depth += 1 if letter in "{[" else -1
                if self._depth == 0:
                    return self._at
        self._at = len(text)
        return None


def _kind_of(text: str) -> Literal["unknown", "json", "text"]:
    """Return the kind of an answer that begins so; one of the markers begins like a list."""
    begin = text.lstrip()
    if any(form.begin.startswith(begin) and form.begin != begin for form in FORMS):  # also the empty text
        return "unknown" if begin[:1] in ("", "[") else "text"
    is_marked = any(begin.startswith(form.begin) for form in FORMS)
    return "json" if begin[0] in "{[" and not is_marked else "text"


def _first_form(text: str) -> Form | None:
    """Return the format whose marker comes first."""
    found = [(at, form) for form in FORMS if (at := text.find(form.begin)) >= 0]
    return min(found, key=lambda one: one[0])[1] if found else None


def _overlap(text: str, mark: str) -> int:
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(mark[:n])), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Tools of a request."""

    told: tuple[Tool, ...] = ()
    """Tools in the model's prompt."""
    allowed: tuple[Tool, ...] = ()
    """Tools that may be called; calls of others stay text."""
    must_call: bool = False
    forced: str | None = None
    """Function that must be called: the answer is its arguments."""

    @property
    def schemas(self) -> dict[str, dict[str, ANY_JSON]]:
        """Argument schema of each tool that may be called."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.allowed}


def tool_use(tools: Sequence[Tool], choice: ToolChoice | None) -> ToolUse:
    """Return the tools of a request.

    With `allowed_tools` the prompt still has all tools, so that it is found in the prefix cache.

    Raises:
        ApiError: two tools have one name, or tool_choice names an unknown tool.
    """
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, f"Two tools have one name (got {names}).", param="tools")
    told = tuple(tools)
    match choice:
        case None | "auto":
            return ToolUse(told=told, allowed=told)
        case "none":
            return ToolUse()
    if not told:
        raise ApiError(
            400, "tool_choice requires a call, but there are no tools. Give some.", param="tool_choice"
        )
    match choice:
        case NamedTool():
            _check_known([choice.function.name], names)
            return ToolUse(told=told, allowed=told, must_call=True, forced=choice.function.name)
        case AllowedChoice():
            wanted = [tool.function.name for tool in choice.allowed_tools.tools]
            _check_known(wanted, names)
            allowed = tuple(tool for tool in told if tool.function.name in wanted)
            return ToolUse(told=told, allowed=allowed, must_call=choice.allowed_tools.mode == "required")
    return ToolUse(told=told, allowed=told, must_call=True)


def _check_known(wanted: Sequence[str], names: Sequence[str]) -> None:
    for name in wanted:
        if name not in names:
            raise ApiError(
                400,
                f"tool_choice names {name!r}, which is not one of the tools {names}.",
                param="tool_choice",
            )
