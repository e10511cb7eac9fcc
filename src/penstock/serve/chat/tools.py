"""Tool calls: tools that a model may call, and calls parsed from the text it streams; pure.

A call is between the markers of one of `tool_parsers.FORMS`, or the whole answer is JSON, one object or a
list of them (Llama 3). Text that turns out not to be a call of a known tool is returned as text: nothing is
lost.

With `streams`, arguments are returned as they are written, as soon as the tool's name is certain. They cannot
be taken back if what follows is malformed. If an answer is cut within the arguments of a call, the call is
returned with the arguments written so far, streamed or whole.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.serve.chat.streamed_calls import CallDelta, StreamedCalls, overlap
from penstock.serve.chat.tool_parsers import FORMS, JSON_CALLS, Form, Tools, read_json
from penstock.serve.errors import ApiError
from penstock.serve.schema.base import ANY_JSON
from penstock.serve.schema.chat import AllowedChoice, Function, NamedTool, Tool, ToolChoice

Unmarked = Literal["calls", "calls or content", "content"]
"""What JSON without markers is. Calls are streamed as they are written; "calls or content" is decided when an
answer ends."""


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
        unmarked: what JSON without markers is.

    >>> reader = ToolReader({"add": {}})
    >>> reader.push('Sure. <tool_ca').content
    'Sure. '
    >>> reader.push('ll>{"name": "add", "arguments": {"a": 1}}</tool_call>').calls
    (CallDelta(arguments='{"a": 1}', name='add'),)
    """

    def __init__(self, tools: Tools, *, streams: bool = False, unmarked: Unmarked = "calls") -> None:
        self._tools = tools
        self._streams = streams
        self._unmarked = unmarked
        self._kind: Literal["unknown", "json", "content", "text"] = "unknown"
        """Kind of answer, by its first characters."""
        self._held = ""  # text since the open marker, if there is one
        self._open: Form | None = None
        self._calls = StreamedCalls(tools, *JSON_CALLS)  # in what is held
        self._after_call = False

    def push(self, text: str) -> Said:
        """Add text; return the output that is certain now."""
        held, self._held = self._held, ""  # the only reference, so that += is in place
        num_seen = len(held)
        held += text
        if self._kind == "unknown":
            self._kind = self._kind_by_grammar(held)
        if self._kind == "content":
            return Said(held)
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
                    keep = max(overlap(held, form.begin) for form in FORMS)
                    self._held, words = held[len(held) - keep :], held[: len(held) - keep]
                    return Said(content + words, tuple(calls))
                words, _, rest = held.partition(form.begin)
                content += words
                held, num_seen, self._open = form.begin + rest, 0, form
                self._calls = StreamedCalls(self._tools, form.first, form.following)
            form = self._open
            begun, end = self._end(held, max(len(form.begin), num_seen - len(form.end) + 1))
            calls += begun
            if end < 0:
                self._held = held
                return Said(content, (*calls, *self._begun(held)))
            said = self._ended(held[:end], form.end, is_cut=False)
            content += said.content
            calls += said.calls
            held, self._open, self._after_call = held[end + len(form.end) :], None, not said.content
            self._calls = StreamedCalls(self._tools, *JSON_CALLS)

    def close(self, *, is_cut: bool = False, stop: int | str | None = None) -> Said:
        """Return what was held back, parsed as far as possible.

        Args:
            is_cut: True: the answer was cut off, so a call without its end marker is incomplete.
            stop: stop text or token that cut it; the end marker of the open call ends the call.
        """
        held, self._held = self._held, ""
        lacks_end = is_cut and (self._open is None or stop != self._open.end)
        said, seen = self._ended(held, "", is_cut=lacks_end), self._calls
        if not is_cut or self._streams or said.calls:
            return said
        if seen.is_open and (self._open is not None or self._unmarked == "calls"):
            return Said(calls=(*seen.whole, seen.begun))
        return Said(held[seen.whole_end :], tuple(seen.whole))

    def _kind_by_grammar(self, held: str) -> Literal["unknown", "json", "content", "text"]:
        """Return the kind of an answer that begins so, if JSON without markers is what the grammar allows."""
        kind = _kind_of(held)
        if kind == "json":
            self._streams &= self._unmarked == "calls"
            return "content" if self._unmarked == "content" else "json"
        is_json_text = self._unmarked != "calls" and held.lstrip().startswith('"')
        return "content" if is_json_text else kind  # a text in JSON may name a marker

    def _end(self, held: str, begin: int) -> tuple[tuple[CallDelta, ...], int]:
        """Return new output, and where the end marker of the open format is: -1, nowhere yet."""
        mark = "" if self._open is None else self._open.end
        new: list[CallDelta] = []
        end = held.find(mark, begin) if mark else -1
        while end >= 0:
            new += self._calls.push(held[:end])
            if not self._calls.is_in_string:
                break
            end = held.find(mark, end + 1)
        return (tuple(new) if self._streams else ()), end

    def _begun(self, held: str) -> tuple[CallDelta, ...]:
        may_end = self._open is not None and overlap(held, self._open.end) > 0
        return self._calls.push(held) if self._streams and not may_end else ()

    def _ended(self, held: str, end: str, *, is_cut: bool) -> Said:
        """Return the rest of the open call format, or of an answer without one."""
        form, seen = self._open, self._calls
        new = seen.push(held)
        read = read_json if form is None else form.read
        inner = held if form is None else held[len(form.begin) :]
        calls = () if is_cut and form is not None and form.needs_end else read(inner, self._tools)
        if self._streams and seen.num_begun:
            content = "" if calls or seen.is_open else held[seen.end :] + end
            return Said(content, (*new, *seen.rest(calls)))
        if calls:
            return Said(calls=tuple(CallDelta(call.arguments, call.name) for call in calls))
        return Said(held + end)


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

    def callable(self) -> Iterator[tuple[Function, str]]:
        """Yield the functions that the answer can be a call of, with the keys of their schemas."""
        names = set(self.schemas) if self.forced is None else {self.forced}
        for index, tool in enumerate(self.told):
            if tool.function.name in names:
                yield tool.function, f"tools[{index}].function.parameters"


_NAME = re.compile(r'"name"\s*+:\s*+"([^"\\]*+)("?)')


def cut_call(text: str, names: Sequence[str]) -> CallDelta | None:
    """Return a required call that was cut before its arguments; None: several tools are possible.

    >>> cut_call('{"name": "ad', ["add", "sub"]), cut_call("{", ["add", "sub"])
    (CallDelta(arguments='', name='add'), None)
    """
    match = _NAME.search(text)
    begin, is_whole = (match[1], bool(match[2])) if match else ("", False)
    possible = [name for name in names if (name == begin if is_whole else name.startswith(begin))]
    return CallDelta("", possible[0]) if len(possible) == 1 else None


def tool_use(tools: Sequence[Tool], choice: ToolChoice | None) -> ToolUse:
    """Return the tools of a request.

    With `allowed_tools` the prompt still has all tools, so that it is found in the prefix cache.

    Raises:
        ApiError: two tools have one name, or tool_choice names an unknown tool.
    """
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(f"Two tools have one name (got {names}).", param="tools")
    told = tuple(tools)
    match choice:
        case None | "auto":
            return ToolUse(told=told, allowed=told)
        case "none":
            return ToolUse()
    if not told:
        raise ApiError("tool_choice requires a call, but there are no tools. Give some.", param="tool_choice")
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
                f"tool_choice names {name!r}, which is not one of the tools {names}.",
                param="tool_choice",
            )
