"""From `response_format`, `structured_outputs` and `guided_*`, which say one thing, to that; pure."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.serve.errors import ApiError
from penstock.serve.schema.body import ANY_JSON
from penstock.serve.schema.formats import (
    ChoiceFormat,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    StructuredOutputs,
    TextFormat,
)
from penstock.serve.schema.generation import Generation


@dataclass(frozen=True, slots=True)
class Wanted:
    """The form that an answer is to have."""

    form: ResponseFormat | None = None
    """None: any text."""
    key: str = "response_format"
    """Where the request says so."""


def wanted_form(body: Generation) -> Wanted:
    """Return the form that a request asks for.

    Raises:
        ApiError: it asks for two, or a schema is no JSON object.
    """
    found = list(_wanted(body))
    if len(found) > 1:
        keys = " and ".join(one.key for one in found)
        raise ApiError(
            400, f"An answer has one form (got {keys}). Leave all but one out.", param=found[1].key
        )
    wanted = found[0] if found else Wanted()
    return Wanted() if isinstance(wanted.form, TextFormat) else wanted


def _wanted(body: Generation) -> Iterator[Wanted]:
    if body.response_format is not None:
        yield Wanted(body.response_format)
    yield from _named(body.structured_outputs or StructuredOutputs(), "structured_outputs.")
    guided = StructuredOutputs(
        json=body.guided_json,
        regex=body.guided_regex,
        choice=body.guided_choice,
        grammar=body.guided_grammar,
    )
    yield from _named(guided, "guided_")


def _named(said: StructuredOutputs, before: str) -> Iterator[Wanted]:
    if said.json_object:
        yield Wanted(JsonObjectFormat(type="json_object"), f"{before}json_object")
    if said.json_ is not None:
        key = f"{before}json"
        schema = JsonSchema(name=key, schema=_object(said.json_, key))
        yield Wanted(JsonSchemaFormat(type="json_schema", json_schema=schema), key)
    if said.regex is not None:
        yield Wanted(RegexFormat(type="regex", regex=said.regex), f"{before}regex")
    if said.choice is not None:
        yield Wanted(ChoiceFormat(type="choice", choice=said.choice), f"{before}choice")
    if said.grammar is not None:
        yield Wanted(GrammarFormat(type="grammar", grammar=said.grammar), f"{before}grammar")


def _object(schema: str | dict[str, ANY_JSON], key: str) -> dict[str, ANY_JSON]:
    if isinstance(schema, dict):
        return schema
    try:
        found = json.loads(schema)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ApiError(400, f"{key} is no JSON object (got {schema[:80]!r}). Send the schema.", param=key)
    return found
