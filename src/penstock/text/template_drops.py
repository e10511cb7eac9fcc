"""Check for text that a chat template drops: reasoning and the like are counted, anything else is refused."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from penstock.core.errors import UsageError
from penstock.text.chat_template import MARK, REASONING_KEYS, Messages

Render = Callable[[Messages], str]
"""Writes messages with a template, without the prompt for an answer."""

_NUMBER_OR_WORD = re.compile(r"-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)|\w+)")

_NO_OTHER_TEXT = ("role", "content", "tool_calls", "name", "id", "type")
"""Keys of an assistant turn that hold no text, or one that is looked for by itself."""


def check_tools(tools: Sequence[object], text: str) -> None:
    """Refuse a text that names a tool nowhere.

    Raises:
        UsageError: with the tool.
    """
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        name = str(function.get("name", "")) if isinstance(function, Mapping) else ""
        if name and name not in text:
            raise UsageError(
                "The template drops the tools",
                got=name,
                fix="Use the template of a model that calls tools.",
            )


def check_kept(messages: Messages, render: Render) -> None:
    """Refuse a template that drops a message of the system, the user or a tool.

    A short text may stand somewhere else as well: each is looked for with a mark of its own behind it.

    Raises:
        UsageError: with the message.
    """
    marked = {
        index: f"{content}{MARK}{index}{MARK}"
        for index, message in enumerate(messages)
        if message["role"] != "assistant" and (content := str(message.get("content") or "").strip())
    }
    text = render(
        [{**message, "content": marked.get(n, message["content"])} for n, message in enumerate(messages)]
    )
    for index, content in marked.items():
        if not _holds(text, content):
            role = messages[index]["role"]
            raise UsageError(
                f"The template drops the {role}'s turn, message {index + 1}, or changes its text",
                got=content.partition(MARK)[0][:60],
                fix="Use a template that has such turns, or leave it out of the conversation.",
            )


def has_dropped(message: Mapping[str, object], answer: str, index: int, *, is_last: bool) -> bool:
    """Return True if the template left out reasoning, a text of a key of its own, or one beside tool calls.

    Args:
        is_last: the turn is the last message. Templates leave out the reasoning of earlier turns on purpose.

    Raises:
        UsageError: it left out something else, the reasoning of the last turn, or everything.
    """
    content = str(message.get("content") or "").strip()
    thoughts = [str(message[key]) for key in REASONING_KEYS if isinstance(message.get(key), str)]
    if "</think>" in content:
        thoughts.append(content.rpartition("</think>")[0].removeprefix("<think>"))
    rest = content.rpartition("</think>")[2].strip()
    # a thought may also occur in the answer, as a number does, so the answer is left out of the search
    without_rest = MARK.join(answer.rsplit(rest, 1)) if rest else answer
    for thought in thoughts if is_last else ():
        if not _holds(without_rest, thought.strip()):
            raise UsageError(
                f"The template drops the reasoning of the last turn, message {index + 1}",
                got=thought.strip()[:60],
                fix="Use the template of a model that reasons, or leave the reasoning out.",
            )
    calls = message.get("tool_calls")
    functions = [call.get("function", call) for call in calls] if isinstance(calls, list) else []
    _check_calls(functions, answer, index)
    others = {name: value for name, value in message.items() if name not in _NO_OTHER_TEXT}
    written = [_holds(answer, text.strip()) for text in _values(others) if isinstance(text, str)]
    if written and not (any(written) or content or functions or any(thoughts)):
        raise UsageError(
            f"The template writes nothing of the assistant's turn, message {index + 1}",
            got=", ".join(others),
            fix='Put what the assistant says into "content", or leave the conversation out.',
        )
    dropped = not all(written)
    if not _holds(answer, content):
        if not functions and (rest == content or not _holds(answer, rest)):
            raise UsageError(
                f"The template drops or changes the text of the assistant's turn, message {index + 1}",
                got=content[:60],
                fix="Correct the template, or leave the conversation out.",
            )
        dropped = True
    return dropped


def _check_calls(functions: Sequence[Mapping[str, object]], answer: str, index: int) -> None:
    """Refuse an answer that lacks the name or an argument of a call.

    Raises:
        UsageError: with what it lacks.
    """
    words = set(_NUMBER_OR_WORD.findall(answer)) if functions else set()
    for function in functions:
        name = str(function.get("name", ""))
        if name not in answer:
            raise UsageError(
                f"The template drops the tool call of message {index + 1}",
                got=name,
                fix="Use the template of a model that calls tools.",
            )
        for value in _values(function.get("arguments")):
            is_there = _has_text(answer, value) if isinstance(value, str) else _is_among(words, value)
            if not is_there:
                raise UsageError(
                    f"The template drops or changes an argument of the tool call of message {index + 1}",
                    got=str(value)[:60],
                    fix="Use the template of a model that calls tools.",
                )


def _holds(text: str, part: str) -> bool:
    """Return True if a text has a part as it is, or as JSON writes it."""
    forms = part, json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1]
    return any(form in text for form in forms)


def _has_text(text: str, value: str) -> bool:
    """Return True if a text has the words of a value in their order, in whatever way it is quoted or escaped.

    A value without words is looked for as it is.

    >>> _has_text('one, "two"', "one\\ttwo"), _has_text("two one", "one two"), _has_text("1 + 2", "+")
    (True, False, True)
    """
    words = re.findall(r"\w+", value)
    if not words:
        return _holds(text, value.strip())
    return _in_order(text, words) or _in_order(text, [json.dumps(word)[1:-1] for word in words])


def _in_order(text: str, words: Sequence[str]) -> bool:
    at = 0
    for word in words:
        at = text.find(word, at)
        if at < 0:
            return False
        at += len(word)
    return True


def _is_among(words: Collection[str], value: float) -> bool:
    """Return True if a number or a boolean is among the words of a text, as JSON or Python writes it."""
    return json.dumps(value) in words or str(value) in words


def _values(value: object) -> Iterator[str | float]:
    """Yield the texts, numbers and booleans of a JSON value, the names of objects left out."""
    if isinstance(value, str | int | float):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _values(each)
    elif isinstance(value, list):
        for each in value:
            yield from _values(each)
