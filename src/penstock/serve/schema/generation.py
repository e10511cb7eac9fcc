"""What requests for completions and for chats have in common, and what both answers count."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(max_length=256)]

FIRST: Any = Field(fail_fast=True)
"""Of a list: only its first mistake is told. A body has room for a million, and telling them holds all up."""

ANY_JSON = Any
"""JSON that is handed on as it came, such as a JSON schema."""


def _is_none(value: object) -> bool:
    return value is None


ABSENT: Any = Field(default=None, exclude_if=_is_none)
"""Of a reply: null is not written."""

RETURNED: Any = Field(default=None, exclude=True)
"""Of a message: what the openai client's objects have besides, and come back with; without effect."""


class Body(BaseModel):
    """A request: unknown keys and values of another type are errors, never dropped or bent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class OneOf:
    """Of a union: what is none of its forms is told them, and not of each why it is not that.

    Args:
        wanted: the forms.
    """

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Hear of the union's schema, and say so in it."""
        schema = handler(source)
        assert schema["type"] == "union", schema["type"]
        return {**schema, "custom_error_type": "one_of", "custom_error_message": f"Must be {self._wanted}"}


class Reply(BaseModel):
    """An answer."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(Body):
    """What a stream has besides its pieces."""

    include_usage: bool = False
    """A last chunk without choices counts the tokens."""
    include_obfuscation: bool | None = None
    """Accepted, without effect."""


class Generation(Body):
    """How answers are made. Null everywhere means: as if it were left out."""

    model: Name | None = None
    """The served model or one of its adapters; left out: the model."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[str | Annotated[list[str], FIRST], OneOf("a text or a list of texts")] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Left out: another one for each request."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """1 where left out, as the API has it."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    """Token id, as a text because it is a key of JSON, to what is added to its logit."""

    # Beyond the API of OpenAI, under the names that vLLM gives them.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """-1 or 0: among all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[TokenId], FIRST] | None = None
    ignore_eos: bool | None = None
    """Go on after the model's own end tokens."""
    priority: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Larger waits longer; a client can put itself behind others, not before them."""

    # Accepted, without effect: bookkeeping of OpenAI's own service.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def wants_stream(self) -> bool:
        """Whether pieces are sent as they come."""
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a count of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


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


class ChoiceFormat(Body):
    """Beyond the API: one of these texts."""

    type: Literal["choice"]
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat | ChoiceFormat,
    Field(discriminator="type"),
]


class PromptTokensDetails(Reply):
    """What of the prompt was found computed."""

    cached_tokens: int


class Usage(Reply):
    """Tokens of a request, over all its answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
