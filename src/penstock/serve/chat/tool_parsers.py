"""Tool call formats of model families, and parsers from complete text; pure.

A model writes the format it was trained on, which its chat template repeats:

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>       Hermes, Qwen, Granite 4
    <tool_call><function=add>                                           Qwen3-Coder, Qwen 3.5; also without
    <parameter=a>                                                       the outer markers
    1
    </parameter>
    </function></tool_call>
    <function=add>{"a": 1}</function>                                   Llama 3.1's own tools
    [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]                Mistral
    [TOOL_CALLS]add[CALL_ID]x[ARGS]{"a": 1}                             Mistral since 2025; the id is dropped
    <|tool_call|>[{"name": "add", "arguments": {"a": 1}}]               Granite 3
    <|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>add      DeepSeek V3 and R1; V3.1 has the name
    ```json                                                             before the separator and no fence
    {"a": 1}
    ```<|tool_call_end|><|tool_calls_end|>

DeepSeek's markers have a wide bar and a low block where these have `|` and `_`. Most tokenizers have a marker
as one added token, special (Mistral, Granite) or not (Qwen, DeepSeek). Text that does not parse completely as
calls of known tools stays text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from penstock.serve.chat.json_scan import children, is_object, value_end

Tools = Mapping[str, Mapping[str, Any]]
"""Name of each offered tool -> JSON schema of its arguments; Any is JSON."""

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def _deepseek(words: str) -> str:
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


_CALLS, _CALLS_END = _deepseek("tool calls begin"), _deepseek("tool calls end")
_CALL, _CALL_END, _SEP = _deepseek("tool call begin"), _deepseek("tool call end"), _deepseek("tool sep")

# Patterns of a call up to its arguments; the one group that matches is the name.
_JSON_CALL = r'\{\s*+"name"\s*+:\s*+"([^"\\]*+)"\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
_FIRST_JSON, _NEXT_JSON = rf"\s*+\[?\s*+{_JSON_CALL}", rf"\s*+\}}\s*+,\s*+{_JSON_CALL}"
_FUNCTION_CALL = r"\s*+(?:</function>\s*+)?<function=([^>]*+)>\s*+(?=[<{])"
_MISTRAL_CALL = r"\s*+\[TOOL_CALLS\]\s*+([\w.-]++)(?:\[CALL_ID\][^\[]*+)?(?:\[ARGS\])?\s*+(?=\{)"
_DEEPSEEK_CALL = (
    rf"\s*+{_CALL}(?:([^<]*+){_SEP}\s*+(?=\{{)|[^<]*+{_SEP}([^\n]*+)\n\s*+(?:```json)?\s*+(?=\{{))"
)
_DEEPSEEK_CALL_END = rf"\s*+(?:```)?\s*+{_CALL_END}"


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed tool call."""

    name: str
    arguments: str
    """JSON object, as the model wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One format of tool calls: its markers and its parser."""

    begin: str
    end: str
    """End marker; empty: the end of the answer."""
    read: Callable[[str, Tools], tuple[Call, ...]]
    """Parses the text between the markers; returns () if it is not a call."""
    inner: tuple[str, ...] = ()
    """Markers between those two."""
    needs_end: bool = False
    """True: without its end marker an incomplete call may look complete."""
    is_list: bool = False
    """True: one list of all calls is between the markers."""
    first: re.Pattern[str]
    """Matches an answer from `begin` to the arguments of the first call; the one group that
    matches is its name."""
    following: re.Pattern[str]
    """The same from the end of a call's arguments to those of the next."""


def read_json(text: str, tools: Tools) -> tuple[Call, ...]:
    """Parse JSON: one call or a list of calls.

    >>> read_json('[{"name": "f", "parameters": {"x": 1}}]', {"f": {}})
    (Call(name='f', arguments='{"x": 1}'),)
    >>> read_json('{"name": "g", "arguments": {}}', {"f": {}})
    ()
    """
    text = text.strip()
    try:
        if value_end(text, 0) < len(text):
            return ()
    except ValueError:
        return ()
    spans = children(text, 0) if text.startswith("[") else [(0, len(text))]
    return _all([_entry(text[begin:end], tools) for begin, end in spans])


def read_marked(text: str, tools: Tools) -> tuple[Call, ...]:
    """Parse the text between `<tool_call>` markers, as JSON or as functions.

    >>> read_marked("<function=f><parameter=x>1</parameter></function>", {"f": {}})
    (Call(name='f', arguments='{"x": 1}'),)
    """
    if not text.lstrip().startswith(_FUNCTION):
        return read_json(text, tools)
    parts = text.split(_FUNCTION_END)
    if parts.pop().strip() or not all(part.lstrip().startswith(_FUNCTION) for part in parts):
        return ()
    found = [read_function(part.lstrip().removeprefix(_FUNCTION), tools) for part in parts]
    return sum(found, ()) if all(found) else ()


def read_function(text: str, tools: Tools) -> tuple[Call, ...]:
    """Parse `NAME>` and its arguments, as parameters or as JSON."""
    name, mark, body = text.partition(">")
    if not mark or name.strip() not in tools:
        return ()
    if body.lstrip().startswith("{"):
        return _all([_call(name.strip(), body, tools)])
    parts = body.split(PARAMETER_END)
    if parts.pop().strip():
        return ()
    arguments: dict[str, str] = {}
    for part in parts:
        key, mark, value = part.lstrip().removeprefix(_PARAMETER).partition(">")
        if not mark or not part.lstrip().startswith(_PARAMETER) or key.strip() in arguments:
            return ()
        schema = schema_of(key.strip(), tools[name.strip()])
        arguments[key.strip()] = json_value(value.removeprefix("\n").removesuffix("\n"), schema)
    fields = (f"{json_text(key)}: {value}" for key, value in arguments.items())
    return (Call(name.strip(), f"{{{', '.join(fields)}}}"),)


def read_mistral(text: str, tools: Tools) -> tuple[Call, ...]:
    """Parse the text after `[TOOL_CALLS]`, as JSON or as names and arguments.

    >>> read_mistral('f[CALL_ID]x[ARGS]{"x": 1}[TOOL_CALLS]f[ARGS]{}', {"f": {}})
    (Call(name='f', arguments='{"x": 1}'), Call(name='f', arguments='{}'))
    """
    if text.lstrip().startswith(("[", "{")):
        return read_json(text, tools)
    text, at, calls = f"[TOOL_CALLS]{text}", 0, []
    while match := _MISTRAL.match(text, at):
        try:
            at = value_end(text, match.end())
        except ValueError:
            return ()
        calls.append(_call(match[1], text[match.end() : at], tools))
    return () if text[at:].strip() else _all(calls)


def read_deepseek(text: str, tools: Tools) -> tuple[Call, ...]:
    """Parse the calls between DeepSeek's markers."""
    at, calls = 0, []
    while match := _DEEPSEEK.match(text, at):
        try:
            end = value_end(text, match.end())
        except ValueError:
            return ()
        calls.append(_call((match[1] or match[2]).strip(), text[match.end() : end], tools))
        ended = _DEEPSEEK_END.match(text, end)
        if ended is None:
            return ()
        at = ended.end()
    return () if text[at:].strip() else _all(calls)


JSON_CALLS = re.compile(_FIRST_JSON), re.compile(_NEXT_JSON)
"""`first` and `following` of an answer that is JSON without markers."""
_FUNCTIONS = re.compile(_FUNCTION_CALL)
_MISTRAL = re.compile(_MISTRAL_CALL)
_DEEPSEEK, _DEEPSEEK_END = re.compile(_DEEPSEEK_CALL), re.compile(_DEEPSEEK_CALL_END)

JSON_FORMS = (
    Form(
        begin="<tool_call>",
        end="</tool_call>",
        read=read_marked,
        first=re.compile(rf"<tool_call>(?:{_FIRST_JSON}|{_FUNCTION_CALL})"),
        following=re.compile(rf"{_NEXT_JSON}|{_FUNCTION_CALL}"),
    ),
    Form(
        begin="[TOOL_CALLS]",
        end="",
        read=read_mistral,
        inner=("[CALL_ID]", "[ARGS]"),
        is_list=True,
        first=re.compile(rf"\[TOOL_CALLS\]{_FIRST_JSON}|{_MISTRAL_CALL}"),
        following=re.compile(rf"{_NEXT_JSON}|{_MISTRAL_CALL}"),
    ),
    Form(
        begin="<|tool_call|>",
        end="",
        read=read_json,
        is_list=True,
        first=re.compile(rf"<\|tool_call\|>{_FIRST_JSON}"),
        following=JSON_CALLS[1],
    ),
)
"""Formats in which required calls can be generated."""
FORMS = (
    *JSON_FORMS,
    Form(
        begin=_FUNCTION,
        end=_FUNCTION_END,
        read=read_function,
        needs_end=True,
        first=_FUNCTIONS,
        following=_FUNCTIONS,
    ),
    Form(
        begin=_CALLS,
        end=_CALLS_END,
        read=read_deepseek,
        inner=(_CALL, _CALL_END, _SEP),
        first=re.compile(_CALLS + _DEEPSEEK_CALL),
        following=re.compile(_DEEPSEEK_CALL_END + _DEEPSEEK_CALL),
    ),
)
MARKS = frozenset(mark for form in FORMS for mark in (form.begin, form.end, *form.inner))
"""All markers. If they are special tokens, they must be kept in the text so that calls are found."""


def _all(calls: Sequence[Call | None]) -> tuple[Call, ...]:
    found = tuple(call for call in calls if call is not None)
    return found if len(found) == len(calls) else ()


def _entry(text: str, tools: Tools) -> Call | None:
    """Return the call that a JSON value is."""
    if not text.startswith("{"):
        return None
    spans = [text[begin:end] for begin, end in children(text, 0)]
    entry = {json.loads(key): value for key, value in zip(spans[::2], spans[1::2], strict=True)}
    name = entry.get("name", "")
    arguments = entry.get("arguments", entry.get("parameters", "{}"))
    return _call(json.loads(name), arguments, tools) if name.startswith('"') else None


def _call(name: str, arguments: str, tools: Tools) -> Call | None:
    """Return a call of a known tool, with the arguments as they were written.

    Args:
        arguments: JSON of an object, or of a string that is such JSON.
    """
    arguments = arguments.strip()
    if arguments.startswith('"'):
        try:
            arguments = json.loads(arguments).strip()
        except ValueError:
            return None
    return Call(name, arguments) if name in tools and is_object(arguments) else None


def json_text(value: object) -> str:
    """Return JSON; letters stay as they are unless there are lone surrogates, which JSON must escape.

    Raises:
        ValueError: a number is not finite.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    is_unicode = text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)
    return text if is_unicode else json.dumps(value)


def schema_of(key: str, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a parameter; empty if the tool has none for it."""
    schemas = tool.get("properties")
    schema = schemas.get(key) if isinstance(schemas, dict) else None
    return schema if isinstance(schema, dict) else {}


def json_value(text: str, schema: Mapping[str, Any]) -> str:
    """Return the JSON of a parameter: templates write strings as they are, and everything else as JSON."""
    kind = schema.get("type")
    try:
        found = text if kind == "string" else _parsed(text.lower() if kind == "boolean" else text)  # True
    except (ValueError, RecursionError):
        found = text
    try:
        return json_text(text if found is not None and _takes_text(schema) else found)
    except ValueError:  # a number beyond float64
        return json_text(text)


def _takes_text(schema: Mapping[str, Any]) -> bool:
    others = schema.get("anyOf")
    kinds = [schema.get("type")]
    if isinstance(others, list):
        kinds += [one.get("type") for one in others if isinstance(one, dict)]
    return any("string" in kind if isinstance(kind, list) else kind == "string" for kind in kinds)


def _parsed(text: str) -> object:
    """Parse JSON; NaN and Infinity are invalid.

    Raises:
        ValueError, RecursionError: it is not JSON.
    """
    found: object = json.loads(text, parse_constant=_refuse)
    return found


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)
