"""Grammars as text: JSON schema, regex, choice and Lark for `Request.grammar`; no torch.

The whole answer must match the grammar: a JSON value, a match of the whole regular expression, a derivation
of the start rule. Syntax and meaning are llguidance's: its Lark dialect, Rust's regular expressions (no
look-around), and the part of JSON Schema that it can enforce (`schema_keywords`); anything else is refused,
never ignored. The text is the cache key, so equal grammars are compiled once (`engine.sampling.grammars`).
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from penstock.core.errors import UsageError
from penstock.engine.sampling.schema_keywords import enforceable, moved

MAX_BYTES = 64 * 2**10
"""Maximum length in bytes. Grammars come from clients, and some cost more than linear time and stack."""

MAX_SCHEMA_BYTES = 192 * 2**10
"""The same of a JSON schema or tool calls, without annotations such as descriptions."""

_MAX_DIGITS = 6
"""Limit of digits in multipleOf. The automaton has as many states as the least common multiple of all
multipleOf; two numbers of six digits would already keep the library busy for years."""

_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*-?(\d+(?:\.\d+)?(?:[eE][-+]?\d{1,3})?)')
_ESCAPED = re.compile(r"\\u([\da-fA-F]{4})")

_MORE = '(", " call)*'
_ANY_OBJECT = {"type": "object"}
_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": True,
}
"""At most one space between the parts of JSON: a model that may add spaces freely may never stop. The
alternatives of a `oneOf` that `enforceable` leaves exclude each other, though the library may not see it."""


def json_schema(schema: Mapping[str, Any]) -> str:  # Any: JSON
    """Return the grammar of the JSON values that match a schema.

    >>> json_schema({"type": "integer"})
    '["json_schema", {"type": "integer", "x-guidance": {"whitespace_flexible": false, ...
    """
    text = _written("json_schema", _prepared(schema), MAX_SCHEMA_BYTES)
    _check_multiples(text)
    return text


def json_object() -> str:
    """Return the grammar of any JSON object."""
    return json_schema(_ANY_OBJECT)


def regex(pattern: str) -> str:
    r"""Return the grammar of texts that match a regular expression in full.

    >>> regex(r"\d+")
    '["regex", "\\\\d+"]'
    """
    return _written("regex", pattern, MAX_BYTES)


def lark(text: str) -> str:
    """Return a grammar in llguidance's dialect of Lark (an EBNF); its first rule is `start`."""
    return _lark(text, MAX_BYTES)


def _lark(text: str, max_bytes: int) -> str:
    written = _written("lark", text, max_bytes)
    _check_multiples(_ESCAPED.sub(lambda match: chr(int(match[1], 16)), text))
    return written


def choice(texts: Sequence[str]) -> str:
    """Return the grammar of a fixed set of texts.

    >>> choice(["yes", "no"])
    '["lark", "start: CHOICE\\\\nCHOICE: \\\\"yes\\\\" | \\\\"no\\\\""]'
    """
    if not texts:
        raise UsageError("A choice needs alternatives", got=list(texts), fix="Give at least one text.")
    # one terminal, compiled to an automaton: a rule may have 2,000 alternatives only
    return lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in texts))


def tool_calls(
    parameters: Mapping[str, Mapping[str, Any]],  # Any: JSON
    *,
    begin: Sequence[str | int] = (),
    end: Sequence[str | int] = (),
    in_list: bool = False,
    name_key: str = "name",
    arguments_key: str = "arguments",
    several: bool = False,
    instead: Mapping[str, Any] | None = None,  # as above
) -> str:
    """Return the grammar of tool calls, each a JSON object with a function's name and its arguments.

    Args:
        parameters: function name -> JSON schema of its arguments.
        begin, end: what surrounds each call in the model's chat template: texts and token ids. An added
            token of the tokenizer must be given as its id: the same letters written by other tokens are a
            different prompt to the model, and the grammar would not match them.
        in_list: `begin` and `end` surround one list of all calls instead.
        several: allow several calls: in the list, or each on its own line; without `begin` and `end`, in
            a list.
        instead: JSON schema of an answer allowed in place of calls; None: none.
    """
    if not parameters:
        raise UsageError("A tool call needs functions", got=dict(parameters), fix="Give at least one.")
    taken = {name: enforceable(schema, strict=True, at=name).schema for name, schema in parameters.items()}
    try:
        calls = json.dumps(_prepared(_any_call(taken, name_key, arguments_key)))
        other = None if instead is None else json.dumps(_prepared(instead))
    except RecursionError:
        raise UsageError("A schema is nested too deeply", fix="Flatten it.") from None
    if in_list:
        body = f'"[" call {_MORE if several else ""} "]"'
    else:
        body = f'call | "[" call {_MORE} "]"' if several and not (begin or end) else "call"
    start = " ".join((*map(_terminal, begin), body, *map(_terminal, end)))
    if several and (begin or end) and not in_list:
        start = f'{start} ("\\n" {start})*'
    rules = f"call: %json {calls}"
    if other is not None:
        start, rules = f"{start} | other", f"{rules}\nother: %json {other}"
    return _lark(f"start: {start}\n{rules}", MAX_SCHEMA_BYTES)


def _any_call(
    parameters: Mapping[str, Mapping[str, Any]], name_key: str, arguments_key: str
) -> dict[str, Any]:  # Any: JSON
    calls = [
        {
            "type": "object",
            "properties": {
                name_key: {"const": name},
                arguments_key: moved(schema, f"#/anyOf/{i}/properties/{arguments_key}") or _ANY_OBJECT,
            },
            "required": [name_key, arguments_key],
            "additionalProperties": False,
        }
        for i, (name, schema) in enumerate(parameters.items())
    ]
    return {"anyOf": calls}


def _prepared(schema: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    return {**enforceable(schema, strict=True).schema, "x-guidance": _OPTIONS}


def _terminal(mark: str | int) -> str:
    return f"<[{mark}]>" if isinstance(mark, int) else json.dumps(mark)


def _written(form: str, content: object, max_bytes: int) -> str:
    try:
        text = json.dumps([form, content])
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"The grammar is not valid JSON: {error}") from None
    if len(text) > max_bytes:
        raise UsageError(
            "The grammar is too long",
            got=f"{len(text):,} bytes",
            fix=f"Use at most {max_bytes:,}, for instance by fewer or shorter alternatives.",
        )
    return text


def _check_multiples(text: str) -> None:
    found = {number for match in _MULTIPLE.findall(text) if (number := Decimal(match).normalize())}
    if not found:
        return
    unit = min(int(number.as_tuple().exponent) for number in found)
    small = all(number.adjusted() - unit <= _MAX_DIGITS for number in found)  # before 1e999 is expanded
    if not small or math.lcm(*(int(number.scaleb(-unit)) for number in found)) > 10**_MAX_DIGITS:
        raise UsageError(
            f"The least common multiple of all multipleOf is above {10**_MAX_DIGITS:,} of the last digit",
            got=sorted(map(str, found)),
            fix="Use fewer or smaller ones.",
        )
