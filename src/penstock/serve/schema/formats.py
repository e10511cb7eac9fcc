"""The forms that an answer can be held to, under the names of OpenAI's API and under those of vLLM."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.serve.schema.body import ANY_JSON, Body, Name, OneOf


class TextFormat(Body):
    """No structure."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A schema with the name that the API gives it."""

    name: Name
    description: str | None = None
    schema_: dict[str, ANY_JSON] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    """The answer follows the schema either way."""


class JsonSchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexFormat(Body):
    """Beyond the API: text that a regular expression matches as a whole."""

    type: Literal["regex"]
    regex: str


class GrammarFormat(Body):
    """Beyond the API: text of a context-free grammar in Lark's notation."""

    type: Literal["grammar"]
    grammar: str


Choice = Annotated[list[str], Field(min_length=1, fail_fast=True)]


class ChoiceFormat(Body):
    """Beyond the API: one of these texts."""

    type: Literal["choice"]
    choice: Choice


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat | ChoiceFormat,
    Field(discriminator="type"),
]


SchemaOrText = Annotated[str | dict[str, ANY_JSON], OneOf("a JSON schema, as an object or as its text")]


class StructuredOutputs(Body):
    """vLLM's word for `response_format`; one of these."""

    json_: SchemaOrText | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choice | None = None
    grammar: str | None = None
    """In Lark's notation; other dialects are refused where they differ."""
