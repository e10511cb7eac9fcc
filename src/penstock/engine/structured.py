"""What an answer must follow, as the text that `Request.grammar` holds; no torch.

An answer follows a grammar if all of it does: a JSON value, a match of the whole regular expression, a
derivation of the start rule. What the texts mean is llguidance's: its Lark dialect, the regular expressions
of Rust (no look-around), and of JSON Schema what it can enforce; anything else is refused, never ignored.
The text alone says everything, so equal demands share what is compiled from them (`engine.grammars`).
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from penstock.core.errors import UsageError

MAX_BYTES = 64 * 2**10
"""The longest grammar. Its author may be anyone, and some cost more than linear time and stack to compile."""

_MAX_DIGITS = 6
"""To tell multiples of numbers apart takes as many states as their least common multiple; the library
counts those of two numbers of six digits until the machine is old."""

_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*-?(\d+(?:\.\d+)?(?:[eE][-+]?\d{1,3})?)')
_ESCAPED = re.compile(r"\\u([\da-fA-F]{4})")

_ANY_OBJECT = {"type": "object"}
_SPACES = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""At most one space between the parts of JSON: a model that is free to add spaces may never stop."""


def json_schema(schema: Mapping[str, Any]) -> str:  # Any: JSON
    """Return the grammar of JSON values that a schema describes.

    >>> json_schema({"type": "integer"})
    '["json_schema", {"type": "integer", "x-guidance": {"whitespace_flexible": false, ...
    """
    text = _written("json_schema", _spaced(schema))
    _check_multiples(text)
    return text


def json_object() -> str:
    """Return the grammar of any JSON object."""
    return json_schema(_ANY_OBJECT)


def regex(pattern: str) -> str:
    r"""Return the grammar of texts that match a regular expression from end to end.

    >>> regex(r"\d+")
    '["regex", "\\\\d+"]'
    """
    return _written("regex", pattern)


def lark(text: str) -> str:
    """Return a grammar written in llguidance's dialect of Lark, an EBNF; its first rule is `start`."""
    written = _written("lark", text)
    _check_multiples(_ESCAPED.sub(lambda match: chr(int(match[1], 16)), text))
    return written


def choice(texts: Sequence[str]) -> str:
    """Return the grammar of a few texts.

    >>> choice(["yes", "no"])
    '["lark", "start: CHOICE\\\\nCHOICE: \\\\"yes\\\\" | \\\\"no\\\\""]'
    """
    if not texts:
        raise UsageError("There is nothing to choose from", got=list(texts), fix="Give at least one text.")
    # one terminal, which becomes an automaton: a rule has room for 2,000 alternatives
    return lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in texts))


def tool_calls(
    parameters: Mapping[str, Mapping[str, Any]],  # Any: JSON
    *,
    begin: str = "",
    end: str = "",
    name_key: str = "name",
    arguments_key: str = "arguments",
    several: bool = False,
    instead: Mapping[str, Any] | None = None,  # as above
) -> str:
    """Return the grammar of calls, each as a JSON object of a function's name and its arguments.

    Args:
        parameters: name of each function that may be called -> JSON schema of its arguments.
        begin, end: text around each call, as the model's chat template writes it.
        several: let one call follow another, on a line of its own; without `begin` and `end`, in a list.
        instead: JSON schema of what may come in place of calls; None: nothing.
    """
    if not parameters:
        raise UsageError("There is no function to call", got=dict(parameters), fix="Give at least one.")
    try:
        calls = json.dumps(_spaced(_any_call(parameters, name_key, arguments_key)))
        other = None if instead is None else json.dumps(_spaced(instead))
    except RecursionError:
        raise UsageError("A schema is nested too deeply", fix="Flatten it.") from None
    start = " ".join(filter(None, (_quoted(begin), "call", _quoted(end))))
    if several and start == "call":
        start = 'call | "[" call (", " call)* "]"'
    elif several:
        start = f'{start} ("\\n" {start})*'
    rules = f"call: %json {calls}"
    if other is not None:
        start, rules = f"{start} | other", f"{rules}\nother: %json {other}"
    return lark(f"start: {start}\n{rules}")


def _any_call(
    parameters: Mapping[str, Mapping[str, Any]], name_key: str, arguments_key: str
) -> dict[str, Any]:  # Any: JSON
    calls = [
        {
            "type": "object",
            "properties": {
                name_key: {"const": name},
                arguments_key: _moved(schema, f"#/anyOf/{i}/properties/{arguments_key}") or _ANY_OBJECT,
            },
            "required": [name_key, arguments_key],
            "additionalProperties": False,
        }
        for i, (name, schema) in enumerate(parameters.items())
    ]
    return {"anyOf": calls}


def _moved(schema: Any, root: str) -> Any:  # Any: JSON
    """Return a schema that is to be part of another: its references begin at a root that is not `#`."""
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"{root}{value[1:]}" if _is_reference(key, value) else _moved(value, root)
        for key, value in schema.items()
    }


def _is_reference(key: str, value: object) -> bool:
    return key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))


def _spaced(schema: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    return {**schema, "x-guidance": _SPACES}


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _written(form: str, content: object) -> str:
    try:
        text = json.dumps([form, content])
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"The grammar is not made of JSON values: {error}") from None
    if len(text) > MAX_BYTES:
        raise UsageError(
            "The grammar is too long",
            got=f"{len(text):,} bytes",
            fix=f"Use at most {MAX_BYTES:,}, for instance by fewer or shorter alternatives.",
        )
    return text


def _check_multiples(text: str) -> None:
    found = {number for match in _MULTIPLE.findall(text) if (number := Decimal(match).normalize())}
    if not found:
        return
    unit = min(int(number.as_tuple().exponent) for number in found)
    small = all(number.adjusted() - unit <= _MAX_DIGITS for number in found)  # before 1e999 is written out
    if not small or math.lcm(*(int(number.scaleb(-unit)) for number in found)) > 10**_MAX_DIGITS:
        raise UsageError(
            f"The least common multiple of all multipleOf is above {10**_MAX_DIGITS:,} of their last digit",
            got=sorted(map(str, found)),
            fix="Use fewer or smaller ones.",
        )
