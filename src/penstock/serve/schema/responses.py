"""`/v1/responses`: OpenAI's newer form of a conversation, as a server has it that keeps nothing."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.serve.schema.generation import (
    ABSENT,
    ANY_JSON,
    FIRST,
    RETURNED,
    Body,
    JsonObjectFormat,
    Name,
    OneOf,
    Reply,
    TextFormat,
)


class InputText(Body):
    """A part of a message; what an answer had besides its text may be sent back with it."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[ANY_JSON] | None = None
    logprobs: list[ANY_JSON] | None = None


class InputMessage(Body):
    """A turn, also one that was an answer."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        str | Annotated[list[InputText], FIRST],
        OneOf('a text or a list of {"type": "input_text", "text": ...}'),
    ]
    type: Literal["message"] | None = None
    id: Name | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = RETURNED


class SchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    name: Name
    schema_: dict[str, ANY_JSON] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None
    """The answer follows the schema either way."""


class TextConfig(Body):
    """What the answer looks like."""

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


class ResponseStreamOptions(Body):
    """Accepted, without effect."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Body):
    """What is asked."""

    model: Name | None = None
    input: Annotated[
        str | Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)],
        OneOf('a text or a list of messages, each {"role": ..., "content": ...}; there are no other items'),
    ]
    instructions: str | None = None
    """Come first, as the system's."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: dict[str, str] | None = None
    """Sent back."""

    # Refused where they ask for something, with what to do instead.
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    tools: list[ANY_JSON] | None = None
    include: list[str] | None = None
    reasoning: dict[str, ANY_JSON] | None = None

    # Accepted, without effect.
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Reply):
    """What the model said."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[str] = Field(default_factory=list)
    logprobs: list[float] = Field(default_factory=list)


class OutputMessage(Reply):
    """The answer."""

    type: Literal["message"] = "message"
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class InputTokensDetails(Reply):
    """What of the prompt was found computed."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Reply):
    """Reasoning is not told from the answer."""

    reasoning_tokens: int = 0


class ResponseUsage(Reply):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = Field(default_factory=OutputTokensDetails)
    total_tokens: int


class IncompleteDetails(Reply):
    """Why an answer was cut."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFault(Reply):
    """Why there is no answer."""

    code: Literal["server_error"] = "server_error"
    message: str


class ResponseText(Reply):
    """The format that was asked for."""

    format: dict[str, ANY_JSON]


class ResponseReply(Reply):
    """The whole."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: Status
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    output: list[OutputMessage] = Field(default_factory=list)
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float
    text: ResponseText
    tool_choice: Literal["auto"] = "auto"
    tools: list[str] = Field(default_factory=list)
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


class ResponseEvent(Reply):
    """One event of a stream; which keys it has besides the first two goes by its type."""

    type: str
    sequence_number: int
    response: ResponseReply | None = ABSENT
    output_index: int | None = ABSENT
    content_index: int | None = ABSENT
    item_id: str | None = ABSENT
    item: OutputMessage | None = ABSENT
    part: OutputText | None = ABSENT
    delta: str | None = ABSENT
    text: str | None = ABSENT
    logprobs: list[float] | None = ABSENT
