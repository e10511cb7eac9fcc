"""Schema: base classes, response formats, generation settings."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from penstock.serve import parameters
from penstock.serve.parameters import Hint, NotHonoured

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(max_length=256)]

FIRST: Any = Field(fail_fast=True)
"""Report only the first error of a list: a body has room for a million entries, and all would block the
loop."""

ANY_JSON = Any
"""JSON passed on unchanged, such as a JSON schema."""


def _is_none(value: object) -> bool:
    return value is None


ABSENT: Any = Field(default=None, exclude_if=_is_none)
"""Field of a reply that is left out if null."""

RETURNED: Any = Field(default=None, exclude=True)
"""Field of a message that the openai client's objects have and send back; without effect."""


class Body(BaseModel):
    """A request body: unknown keys and wrong types are errors, never dropped or converted."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # attribute docstrings become descriptions in the OpenAPI document
    )


class Settings(Body):
    """Keys of which a request has few; not for items, of which it may have 60,000. Null is an absent key."""

    not_honoured: ClassVar[Mapping[str, NotHonoured]] = {}
    """Published parameters without a field."""

    @model_validator(mode="before")
    @classmethod
    def _honoured(cls, given: object) -> object:
        """Return a body without hints and without nulls of known keys; refuse what is refused."""
        if not isinstance(given, dict):
            return given
        if cls.not_honoured and (key := parameters.refused_key(given, cls.not_honoured)):
            why = cls.not_honoured[key].why
            raise PydanticCustomError("refused", "{why}", {"why": why, "key": key, "given": given[key]})
        if None not in given.values() and cls.not_honoured.keys().isdisjoint(given):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {
            key: one
            for key, one in given.items()
            if key not in cls.not_honoured and not (one is None and key in known)
        }

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Add the parameters without a field that are accepted."""
        made = handler(schema)
        properties = handler.resolve_ref_schema(made).setdefault("properties", {})
        for key, one in cls.not_honoured.items():
            if isinstance(one, Hint) or one.unless:
                properties[key] = one.json_schema()
        return made


class OneOf:
    """Replaces the errors of all members of a union by one that lists the accepted forms.

    Args:
        wanted: the accepted forms.
    """

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Set the custom error in the union's schema."""
        schema = handler(source)
        assert schema["type"] == "union", schema["type"]
        return {**schema, "custom_error_type": "one_of", "custom_error_message": f"Must be {self._wanted}"}


class Reply(BaseModel):
    """A response body."""

    model_config = ConfigDict(extra="forbid")


class TextFormat(Body):
    """Plain text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A JSON schema with a name."""

    name: Name
    description: str | None = None
    schema_: dict[str, ANY_JSON] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    """true: refuse keywords that cannot be enforced; else the header X-Penstock-Not-Enforced names them."""


class JsonSchemaFormat(Body):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexFormat(Body):
    """Extension: text that matches a regular expression as a whole."""

    type: Literal["regex"]
    regex: str


class GrammarFormat(Body):
    """Extension: text of a context-free grammar in Lark notation."""

    type: Literal["grammar"]
    grammar: str


Choice = Annotated[list[str], Field(min_length=1, fail_fast=True)]


class ChoiceFormat(Body):
    """Extension: one of these texts."""

    type: Literal["choice"]
    choice: Choice


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat | ChoiceFormat,
    Field(discriminator="type"),
]


SchemaOrText = Annotated[str | dict[str, ANY_JSON], OneOf("a JSON schema, as an object or as its text")]


class StructuredOutputs(Body):
    """vLLM's form of `response_format`; exactly one of these."""

    json_: SchemaOrText | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choice | None = None
    grammar: str | None = None
    """In Lark notation; other dialects are refused where they differ."""


class StreamOptions(Settings):
    """Options of streams."""

    not_honoured = parameters.STREAM_OPTIONS
    include_usage: bool = False
    """Send a last chunk without choices that has the token counts."""
    continuous_usage_stats: bool = False
    """Extension: every chunk has the token counts so far."""


AllowedIds = Annotated[list[TokenId], Field(min_length=1, max_length=4096, fail_fast=True)]
LogprobIds = Annotated[list[TokenId], Field(min_length=1, max_length=128, fail_fast=True)]
BadWord = Annotated[str, Field(min_length=1, max_length=256)]
BadWords = Annotated[list[BadWord], Field(max_length=128, fail_fast=True)]


class Truncation(Settings):
    """Truncation of prompts, under vLLM's names."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Use only this many tokens of a prompt; -1: as many as fit the context; of an embedded text,
    also the folder's max_seq_length."""
    truncation_side: Literal["left", "right"] | None = None
    """left: the last tokens are used; right: the first. Default: left, for embeddings right."""


class SamplingSettings(Truncation):
    """Settings of every generated answer."""

    model: Name | None = None
    """The served model or one of its adapters; default: the model."""
    stop: Annotated[str | Annotated[list[str], FIRST], OneOf("a text or a list of texts")] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Default: random for each request."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Default: the model's generation_config.json, else 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    """Token id, as a JSON key, to the value added to its logit."""

    # Extensions under vLLM's names.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Sample among the k likeliest tokens; -1 or 0: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[TokenId], FIRST] | None = None
    allowed_token_ids: AllowedIds | None = None
    """Sample among these tokens only."""
    bad_words: BadWords | None = None
    """Texts that answers must not contain, as token sequences with and without a space before; the same
    letters may still appear in other tokens."""
    ignore_eos: bool | None = None
    """Continue after the model's end tokens."""
    priority: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Larger values wait longer; a client can lower its priority, not raise it."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Prefix cache namespace: only requests with the same salt share cached prompts."""
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Choice | None = None
    guided_grammar: str | None = None


class Generation(SamplingSettings):
    """Settings of `/v1/completions` and `/v1/chat/completions`."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    # Extensions under vLLM's names.
    logprob_token_ids: LogprobIds | None = None
    """Return log-probabilities of these tokens instead of the likeliest."""
    prompt_logprobs: Annotated[int, Field(ge=-1, le=20)] | None = None
    """Return log-probabilities of the prompt, with this many likeliest alternatives; -1: of the whole
    vocabulary; not in streams."""
    return_token_ids: bool | None = None
    """Also return the token ids of prompt and answer."""
    return_tokens_as_token_ids: bool | None = None
    """Name tokens in log-probabilities by id, as `token_id:5`; parts of characters have no other name."""

    @property
    def wants_stream(self) -> bool:
        """True if the response is streamed."""
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        """True if the stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_running_usage(self) -> bool:
        """True if each chunk has token counts."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class PromptLogprob(Reply):
    """Log-probability of a prompt token, or of an alternative to it."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""One entry per prompt token, by token id; null for the first."""


class PromptTokensDetails(Reply):
    """Prompt tokens taken from the prefix cache."""

    cached_tokens: int


class Usage(Reply):
    """Token counts of a request, over all its answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
