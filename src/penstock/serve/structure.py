"""From tools and the form of an answer to the grammar that the engine holds it to; pure."""

from penstock.core.errors import UsageError
from penstock.engine import structured
from penstock.serve.errors import ApiError, api_error_of
from penstock.serve.form_choice import Wanted
from penstock.serve.schema.body import ANY_JSON
from penstock.serve.schema.formats import (
    ChoiceFormat,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
)
from penstock.serve.tool_choice import ToolUse
from penstock.serve.tool_forms import CLOSE, OPEN

_ANY_OBJECT = {"type": "object"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def grammar_of_answer(use: ToolUse, wanted: Wanted, *, marked: bool, several: bool) -> str | None:
    """Return the grammar of an answer, which is calls or has a form where both are asked for; None: any text.

    A call of a named tool is its arguments alone, one that the model chooses has its name too: this is how
    `ChatWriter` and `ToolReader` read them.

    Args:
        marked: the model writes `<tool_call>` around a call.
        several: it may make more than one.

    Raises:
        ApiError: it is too long, nothing could be it, or it is either a call or of a form that is not JSON.
    """
    may_have_form = wanted.form is not None and not use.must_call
    if not use.must_call and not (may_have_form and use.allowed):
        return grammar_of(wanted)
    if may_have_form:
        grammar_of(wanted)  # what is wrong with the form is said of its own key
    instead = _schema_of(wanted) if may_have_form else None
    parameters = {tool.function.name: tool.function.parameters or _NO_ARGUMENTS for tool in use.allowed}
    begin, end = (f"{OPEN}\n", f"\n{CLOSE}") if marked else ("", "")
    try:
        if use.forced is not None:
            return structured.json_schema(parameters[use.forced])
        return structured.tool_calls(parameters, begin=begin, end=end, several=several, instead=instead)
    except UsageError as error:
        raise api_error_of(error, param="tools") from None


def grammar_of(wanted: Wanted) -> str | None:
    """Return the grammar of an answer's form; None: any text.

    Raises:
        ApiError: it is too long, or nothing could be it.
    """
    try:
        return None if wanted.form is None else _grammar_of(wanted.form)
    except UsageError as error:
        raise api_error_of(error, param=wanted.key) from None


def _schema_of(wanted: Wanted) -> dict[str, ANY_JSON]:
    form = wanted.form
    if isinstance(form, JsonObjectFormat):
        return _ANY_OBJECT
    if isinstance(form, JsonSchemaFormat):
        return form.json_schema.schema_ or _ANY_OBJECT
    raise ApiError(
        400,
        f"An answer that may be a call is JSON or any text otherwise (got {wanted.key} of another form). "
        "Use a JSON schema, or leave the tools out.",
        param=wanted.key,
    )


def _grammar_of(form: ResponseFormat) -> str | None:
    match form:
        case JsonObjectFormat():
            return structured.json_object()
        case JsonSchemaFormat():
            return structured.json_schema(form.json_schema.schema_ or _ANY_OBJECT)
        case RegexFormat():
            return structured.regex(form.regex)
        case GrammarFormat():
            return structured.lark(form.grammar)
        case ChoiceFormat():
            return structured.choice(form.choice)
    return None
