"""Response formats: from `response_format`, tools and `guided_*` to the grammar of an answer; pure."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.core.errors import UsageError
from penstock.engine.sampling import grammar_text
from penstock.engine.sampling.schema_keywords import Enforceable, enforceable
from penstock.serve.chat.tool_parsers import JSON_FORMS, Form
from penstock.serve.chat.tools import ToolUse, Unmarked
from penstock.serve.errors import ApiError, api_error_of
from penstock.serve.schema.base import (
    ANY_JSON,
    ChoiceFormat,
    Generation,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    StructuredOutputs,
    TextFormat,
)
from penstock.serve.schema.chat import Function
from penstock.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Format that an answer must have."""

    form: ResponseFormat | None = None
    """None: any text."""
    key: str = "response_format"
    """Key of the request that asks for it, for error messages."""

    @property
    def schema_key(self) -> str:
        """Key of its JSON schema."""
        return f"{self.key}.json_schema.schema" if self.key == "response_format" else self.key


def wanted_form(body: Generation) -> AnswerFormat:
    """Return the format that a request asks for.

    Raises:
        ApiError: it asks for two, or a schema is not a JSON object.
    """
    found = list(_wanted(body))
    if len(found) > 1:
        keys = " and ".join(one.key for one in found)
        raise ApiError(f"An answer has one format (got {keys}). Leave all but one out.", param=found[1].key)
    wanted = found[0] if found else AnswerFormat()
    return AnswerFormat() if isinstance(wanted.form, TextFormat) else wanted


def _wanted(body: Generation) -> Iterator[AnswerFormat]:
    if body.response_format is not None:
        yield AnswerFormat(body.response_format)
    yield from _named(body.structured_outputs or StructuredOutputs(), "structured_outputs.")
    guided = StructuredOutputs(
        json=body.guided_json,
        regex=body.guided_regex,
        choice=body.guided_choice,
        grammar=body.guided_grammar,
    )
    yield from _named(guided, "guided_")


def _named(said: StructuredOutputs, before: str) -> Iterator[AnswerFormat]:
    if said.json_object:
        yield AnswerFormat(JsonObjectFormat(type="json_object"), f"{before}json_object")
    if said.json_ is not None:
        key = f"{before}json"
        schema = JsonSchema(name=key, schema=_object(said.json_, key))
        yield AnswerFormat(JsonSchemaFormat(type="json_schema", json_schema=schema), key)
    if said.regex is not None:
        yield AnswerFormat(RegexFormat(type="regex", regex=said.regex), f"{before}regex")
    if said.choice is not None:
        yield AnswerFormat(ChoiceFormat(type="choice", choice=said.choice), f"{before}choice")
    if said.grammar is not None:
        yield AnswerFormat(GrammarFormat(type="grammar", grammar=said.grammar), f"{before}grammar")


def _object(schema: str | dict[str, ANY_JSON], key: str) -> dict[str, ANY_JSON]:
    if isinstance(schema, dict):
        return schema
    try:
        found = json.loads(schema)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ApiError(f"{key} is not a JSON object (got {schema[:80]!r}). Send the schema.", param=key)
    return found


_ANY_OBJECT = {"type": "object"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def call_form(template: ChatTemplate) -> Form | None:
    """Return the JSON format of tool calls that a chat template teaches the model; None: none."""
    source = template.tool_source or template.source or ""
    return next((form for form in JSON_FORMS if form.begin in source), None)


def unmarked_json(grammar: str | None, use: ToolUse, form: Form | None) -> Unmarked:
    """Return what JSON without the markers of a call is in an answer.

    Args:
        grammar, form: grammar of the answer, and the format of calls with which it was made.
    """
    if grammar is None or use.must_call:
        return "calls"
    return "calls or content" if form is None else "content"


def grammar_of_answer(
    use: ToolUse, wanted: AnswerFormat, *, form: Form | None, added: Mapping[str, int], several: bool
) -> str | None:
    """Return the grammar of an answer with tools, a response format, or either; None: any text.

    A call of a tool named by the request is its arguments alone; a call that the model chooses also has the
    name. This is what `ChatWriter` and `ToolReader` expect.

    Args:
        form: markers of calls in this model's format.
        added: ids of the tokenizer's added tokens, which may include the markers.
        several: allow several calls.

    Raises:
        ApiError: the grammar is too long or impossible, or tools are combined with a format other than JSON.
    """
    may_have_form = wanted.form is not None and not use.must_call
    if not use.must_call and not (may_have_form and use.allowed):
        return grammar_of(wanted)
    if may_have_form:
        grammar_of(wanted)  # reports errors of the format under its own key
    instead = _schema_of(wanted) if may_have_form else None
    try:
        parameters = {function.name: arguments_of(function, at) for function, at in use.callable()}
        if use.forced is not None:
            return grammar_text.json_schema(parameters[use.forced])
        if form is None:
            return grammar_text.tool_calls(parameters, several=several, instead=instead)
        begin, end = added.get(form.begin, form.begin), added.get(form.end, form.end)
        return grammar_text.tool_calls(
            parameters,
            begin=(begin,) if form.is_list else (begin, "\n"),
            end=() if form.is_list else ("\n", end),
            in_list=form.is_list,
            several=several,
            instead=instead,
        )
    except UsageError as error:
        raise api_error_of(error, param="tools") from None


def arguments_of(function: Function, at: str) -> dict[str, ANY_JSON]:
    """Return the schema of a function's arguments, which are an object even where its schema takes others.

    Raises:
        UsageError: its schema is not of an object, is nested too deeply, or is strict and cannot be enforced.
    """
    schema = function.parameters or _NO_ARGUMENTS
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise UsageError(
            "The arguments of a function are an object",
            got=f"parameters of type {kinds!r} for {function.name!r}",
            fix="Put them into the properties of an object.",
        )
    return {**_enforced(function, at).schema, "type": "object"}


def _enforced(function: Function, at: str) -> Enforceable:
    return enforceable(function.parameters or _NO_ARGUMENTS, strict=function.strict is True, at=at)


def not_enforced(use: ToolUse, wanted: AnswerFormat) -> tuple[str, ...]:
    """Return the keywords of a request's schemas that its grammar does not enforce, with their paths."""
    missed: list[str] = []
    if isinstance(wanted.form, JsonSchemaFormat) and not use.must_call:
        missed += _checked(wanted).not_enforced
    if use.must_call or (wanted.form is not None and use.allowed):
        for function, at in use.callable():
            missed += _enforced(function, at).not_enforced
    return tuple(missed)


def _checked(wanted: AnswerFormat) -> Enforceable:
    assert isinstance(wanted.form, JsonSchemaFormat), wanted
    schema = wanted.form.json_schema
    return enforceable(schema.schema_ or _ANY_OBJECT, strict=schema.strict is True, at=wanted.schema_key)


def grammar_of(wanted: AnswerFormat) -> str | None:
    """Return the grammar of a response format; None: any text.

    Raises:
        ApiError: the grammar is too long or impossible.
    """
    try:
        return None if wanted.form is None else _grammar_of(wanted)
    except UsageError as error:
        raise api_error_of(error, param=wanted.key) from None


def schema_of(wanted: AnswerFormat) -> dict[str, ANY_JSON] | None:
    """Return the schema that a response format gives, as far as it can be enforced; None: it gives none."""
    return _checked(wanted).schema if isinstance(wanted.form, JsonSchemaFormat) else None


def _schema_of(wanted: AnswerFormat) -> dict[str, ANY_JSON]:
    form = wanted.form
    if isinstance(form, JsonObjectFormat):
        return _ANY_OBJECT
    if isinstance(form, JsonSchemaFormat):
        return _checked(wanted).schema
    raise ApiError(
        f"With tools, an answer other than a call must be JSON or any text (got {wanted.key}). "
        "Use a JSON schema, or leave the tools out.",
        param=wanted.key,
    )


def _grammar_of(wanted: AnswerFormat) -> str | None:
    match form := wanted.form:
        case JsonObjectFormat():
            return grammar_text.json_object()
        case JsonSchemaFormat():
            return grammar_text.json_schema(_checked(wanted).schema)
        case RegexFormat():
            return grammar_text.regex(form.regex)
        case GrammarFormat():
            return grammar_text.lark(form.grammar)
        case ChoiceFormat():
            return grammar_text.choice(form.choice)
    return None
