"""Calls of tools in what a model writes: found while the text streams; pure.

A call is between the marks of one of `tool_forms.FORMS`, or an answer is nothing but JSON, one object or a
list of them (Llama 3, and Mistral and Granite 3, whose opening mark is a special token, no part of the text).
What turns out not to be a call of a known tool is text after all: nothing that the model wrote is lost.
"""

from dataclasses import dataclass

from penstock.serve.tool_forms import FORMS, Call, Form, Tools, read_json


@dataclass(frozen=True, slots=True)
class Said:
    """What a piece of text added: words, then calls."""

    content: str = ""
    calls: tuple[Call, ...] = ()


class ToolReader:
    """Splits one answer into words and calls.

    Args:
        tools: that were offered.

    >>> reader = ToolReader({"add": {}})
    >>> reader.push('Sure. <tool_ca'), reader.push('ll>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    (Said(content='Sure. ', calls=()), Said(content='', calls=(Call(name='add', arguments='{"a": 1}'),)))
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
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
            form = _first_form(self._held)
            if form is None:
                keep = max(_overlap(self._held, form.begin) for form in FORMS)
                self._held, words = self._held[len(self._held) - keep :], self._held[: len(self._held) - keep]
                return Said(content + words, tuple(calls))
            words, _, rest = self._held.partition(form.begin)
            inner, mark, after = rest.partition(form.end)
            content += words
            if not mark:
                self._held = form.begin + rest
                return Said(content, tuple(calls))
            found = form.read(inner, self._tools)
            content += "" if found else form.begin + inner + form.end
            calls += found
            self._held, self._after_call = after, bool(found)

    def close(self) -> Said:
        """Return what was held back, read as well as it can be."""
        held, self._held = self._held, ""
        form = _first_form(held)
        calls = read_json(held, self._tools)
        if form is not None:
            calls = form.read(held.removeprefix(form.begin), self._tools)
        return Said(calls=calls) if calls else Said(content=held)


def _first_form(text: str) -> Form | None:
    """Return the form whose mark comes first."""
    found = [(at, form) for form in FORMS if (at := text.find(form.begin)) >= 0]
    return min(found, key=lambda one: one[0])[1] if found else None


def _overlap(text: str, mark: str) -> int:
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(mark[:n])), 0)
