"""JSON located in a text, of any depth and with numbers of any size; pure.

`json.loads` has limits: about a thousand levels, 4,300 digits, float64. A grammar lets a model write beyond
them, so JSON is located here without being converted.
"""

import re
from collections.abc import Iterator

Span = tuple[int, int]
"""Begin and end of a value in its text."""

_STRING = r'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
_NUMBER = r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?"
_TOKEN = re.compile(rf"[ \t\n\r]*+(?:([\[{{\]}},:])|({_STRING})|({_NUMBER}|true|false|null))")
_CLOSES = {"]": "[", "}": "{"}


def value_end(text: str, begin: int) -> int:
    """Return the end of the JSON value that begins at `begin`, or at the first character after white space.

    Raises:
        ValueError: no value begins there, or it is malformed or incomplete. NaN and Infinity are malformed.

    >>> value_end('{"a": [1e999]}, 2', 0)
    14
    """
    open_brackets: list[str] = []
    wanted, at = "value", begin
    while match := _TOKEN.match(text, at):
        at = match.end()
        mark, string = match[1], match[2]
        if mark in _CLOSES and open_brackets and open_brackets[-1] == _CLOSES[mark] and wanted in _MAY_CLOSE:
            open_brackets.pop()
            wanted = "next"
        elif mark in ("[", "{") and wanted in _IS_VALUE:
            open_brackets.append(mark)
            wanted = "first item" if mark == "[" else "first key"
        elif mark == "," and wanted == "next":
            wanted = "value" if open_brackets[-1] == "[" else "key"
        elif mark == ":" and wanted == "colon":
            wanted = "value"
        elif mark is None and wanted in _IS_VALUE:
            wanted = "next"
        elif string is not None and wanted in ("key", "first key"):
            wanted = "colon"
        else:
            break
        if wanted == "next" and not open_brackets:
            return at
    raise ValueError(f"not JSON at character {at}")


def children(text: str, begin: int) -> Iterator[Span]:
    """Yield the items of a list, or the keys and values of an object in turn.

    Args:
        begin: where the list or the object begins, for which `value_end` raises nothing.

    >>> text = '{"a": [1, 2], "b": 3}'
    >>> [text[start:end] for start, end in children(text, 0)]
    ['"a"', '[1, 2]', '"b"', '3']
    """
    at = begin + 1
    while True:
        while text[at] in _BETWEEN:
            at += 1
        if text[at] in "]}":
            return
        end = value_end(text, at)
        yield at, end
        at = end


def is_object(text: str) -> bool:
    """Return whether a text is one JSON object.

    >>> is_object(' {"a": -1e999} '), is_object("[1]"), is_object('{"a"')
    (True, False, False)
    """
    try:
        return text.lstrip(_WHITE)[:1] == "{" and not text[value_end(text, 0) :].strip(_WHITE)
    except ValueError:
        return False


_WHITE = " \t\n\r"
_BETWEEN = f"{_WHITE},:"
_IS_VALUE = ("value", "first item")
_MAY_CLOSE = ("next", "first item", "first key")
