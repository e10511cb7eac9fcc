"""From `response_format` and `tool_choice` to the grammar that the engine holds an answer to; pure."""

from penstock.core.errors import UsageError
from penstock.engine import structured
from penstock.serve.errors import api_error_of
from penstock.serve.schema.generation import (
    ChoiceFormat,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    TextFormat,
)
from penstock.serve.tool_choice import ToolUse
from penstock.serve.tool_forms import CLOSE, OPEN

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def grammar_of(wanted: ResponseFormat | None) -> str | None:
    """Return the grammar of an answer's form; None: any text.

    Raises:
        ApiError: it is too long, or nothing could be it.
    """
    try:
        return None if wanted is None else _grammar_of(wanted)
    except UsageError as error:
        raise api_error_of(error, param="response_format") from None


def grammar_of_calls(use: ToolUse, *, marked: bool, several: bool) -> str | None:
    """Return the grammar of an answer that must be calls; None: it need not be one.

    A call of a named tool is its arguments alone, one that the model chooses has its name too: this is how
    `ChatWriter` and `ToolReader` read them.

    Args:
        marked: the model writes `<tool_call>` around a call.
        several: it may make more than one.

    Raises:
        ApiError: the tools' schemas are too long.
    """
    if not use.must_call:
        return None
    parameters = {tool.function.name: tool.function.parameters or _NO_ARGUMENTS for tool in use.allowed}
    try:
        if use.forced is not None:
            return structured.json_schema(parameters[use.forced])
        begin, end = (f"{OPEN}\n", f"\n{CLOSE}") if marked else ("", "")
        return structured.tool_calls(parameters, begin=begin, end=end, several=several)
    except UsageError as error:
        raise api_error_of(error, param="tools") from None


def _grammar_of(wanted: ResponseFormat) -> str | None:
    match wanted:
        case TextFormat():
            return None
        case JsonObjectFormat():
            return structured.json_object()
        case JsonSchemaFormat():
            return structured.json_schema(wanted.json_schema.schema_ or {"type": "object"})
        case RegexFormat():
            return structured.regex(wanted.regex)
        case GrammarFormat():
            return structured.lark(wanted.grammar)
        case ChoiceFormat():
            return structured.choice(wanted.choice)
