"""From `response_format` and `tool_choice` to the grammar that the engine holds an answer to; pure."""

from penstock.core.errors import UsageError
from penstock.engine import structured
from penstock.serve.errors import ApiError, api_error_of
from penstock.serve.schema.generation import (
    ANY_JSON,
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

_ANY_OBJECT = {"type": "object"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def grammar_of_answer(
    use: ToolUse, wanted: ResponseFormat | None, *, marked: bool, several: bool
) -> str | None:
    """Return the grammar of an answer, which is calls or has a form where both are asked for; None: any text.

    A call of a named tool is its arguments alone, one that the model chooses has its name too: this is how
    `ChatWriter` and `ToolReader` read them.

    Args:
        marked: the model writes `<tool_call>` around a call.
        several: it may make more than one.

    Raises:
        ApiError: it is too long, nothing could be it, or it is either a call or of a form that is not JSON.
    """
    may_have_form = not use.must_call and not isinstance(wanted, None | TextFormat)
    if not use.must_call and not (may_have_form and use.allowed):
        return grammar_of(wanted)
    instead = _schema_of(wanted) if may_have_form else None
    parameters = {tool.function.name: tool.function.parameters or _NO_ARGUMENTS for tool in use.allowed}
    begin, end = (f"{OPEN}\n", f"\n{CLOSE}") if marked else ("", "")
    try:
        if use.forced is not None:
            return structured.json_schema(parameters[use.forced])
        return structured.tool_calls(parameters, begin=begin, end=end, several=several, instead=instead)
    except UsageError as error:
        raise api_error_of(error, param="tools") from None


def grammar_of(wanted: ResponseFormat | None) -> str | None:
    """Return the grammar of an answer's form; None: any text.

    Raises:
        ApiError: it is too long, or nothing could be it.
    """
    try:
        return None if wanted is None else _grammar_of(wanted)
    except UsageError as error:
        raise api_error_of(error, param="response_format") from None


def _schema_of(wanted: ResponseFormat | None) -> dict[str, ANY_JSON]:
    match wanted:
        case JsonObjectFormat():
            return _ANY_OBJECT
        case JsonSchemaFormat():
            return wanted.json_schema.schema_ or _ANY_OBJECT
    kind = None if wanted is None else wanted.type
    raise ApiError(
        400,
        "An answer that may be a call is JSON or any text otherwise "
        f"(got a response_format of {kind!r}). Use json_schema, or leave the tools out.",
        param="response_format",
    )


def _grammar_of(wanted: ResponseFormat) -> str | None:
    match wanted:
        case TextFormat():
            return None
        case JsonObjectFormat() | JsonSchemaFormat():
            return structured.json_schema(_schema_of(wanted))
        case RegexFormat():
            return structured.regex(wanted.regex)
        case GrammarFormat():
            return structured.lark(wanted.grammar)
        case ChoiceFormat():
            return structured.choice(wanted.choice)
