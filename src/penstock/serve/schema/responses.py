"""Schema of /v1/responses: bodies, items of output and the events of a stream."""

from typing import Annotated, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag

from penstock.serve import parameters
from penstock.serve.schema.base import (
    ABSENT,
    ANY_JSON,
    FIRST,
    RETURNED,
    Body,
    JsonObjectFormat,
    Name,
    OneOf,
    Reply,
    SamplingSettings,
    Settings,
    TextFormat,
)
from penstock.serve.schema.chat import ChatTokenLogprob, FunctionName

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(Body):
    """Text part of a message; may have the other fields of an answer's part."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[ANY_JSON] | None = None
    logprobs: list[ANY_JSON] | None = None
    parsed: ANY_JSON = RETURNED
    prompt_cache_breakpoint: ANY_JSON = RETURNED


Texts = Annotated[
    str | Annotated[list[InputText], FIRST],
    OneOf('a text or a list of {"type": "input_text", "text": ...}'),
]


class InputMessage(Body):
    """Message of a conversation, earlier answers included."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Texts
    type: Literal["message"] | None = None
    id: Name | None = None
    status: ItemStatus | None = None
    phase: str | None = RETURNED


class InputCall(Body):
    """Tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    id: Name | None = None
    status: ItemStatus | None = None
    parsed_arguments: ANY_JSON = RETURNED
    async_: None = Field(default=None, exclude=True, validation_alias=AliasChoices("async", "async_"))
    caller: None = RETURNED
    namespace: None = RETURNED


class InputCallOutput(Body):
    """Result of a function."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Texts
    id: Name | None = None
    status: ItemStatus | None = None
    name: Name | None = RETURNED
    caller: None = RETURNED
    namespace: None = RETURNED


class InputReasoningText(Body):
    """Reasoning text."""

    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Body):
    """Reasoning before the item that follows."""

    type: Literal["reasoning"]
    id: Name | None = None
    summary: list[ANY_JSON] | None = None
    content: Annotated[list[InputReasoningText], FIRST] | None = None
    status: ItemStatus | None = None
    encrypted_content: None = RETURNED


def _kind_of_item(item: object) -> str | None:
    """Return the type of an item; the default is a message."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message" if kind is None else None


def _kind_of_input(given: object) -> str | None:
    return "text" if isinstance(given, str) else "items" if isinstance(given, list) else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(
        _kind_of_item,
        custom_error_type="one_of",
        custom_error_message='Must have the type "message", "function_call", "function_call_output" or '
        '"reasoning"; there are no other items',
    ),
]
Input = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), Tag("items")],
    Discriminator(
        _kind_of_input, custom_error_type="one_of", custom_error_message="Must be a text or a list of items"
    ),
]


class ResponseTool(Settings):
    """Function that may be called; the server has no built-in tools."""

    not_honoured = parameters.RESPONSE_TOOL
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, ANY_JSON] | None = None
    """JSON schema of an object; default: no arguments."""
    strict: bool = True
    """As in `/v1/chat/completions`, where it is off unless it is given."""


class ResponsesFunction(Body):
    """Function that must be called."""

    type: Literal["function"]
    name: Name


class AllowedFunctions(Body):
    """Restricts calls to a subset of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseTool], Field(min_length=1, max_length=128, fail_fast=True)]
    """Only their names matter."""


ResponseToolChoice = Annotated[
    Literal["none", "auto", "required"] | ResponsesFunction | AllowedFunctions,
    OneOf(
        '"none", "auto", "required", {"type": "function", "name": ...}, or '
        '{"type": "allowed_tools", "mode": "auto" or "required", "tools": [...]}'
    ),
]


class SchemaFormat(Body):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    name: Name
    schema_: dict[str, ANY_JSON] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None
    """As in `/v1/chat/completions`."""


class TextConfig(Settings):
    """Format of the answer."""

    not_honoured = parameters.TEXT
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


class Reasoning(Settings):
    """Settings of reasoning."""

    not_honoured = parameters.REASONING
    effort: Name | None = None
    """Same as `reasoning_effort` in `/v1/chat/completions`."""


Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]
"""Log-probabilities can be included. The others are hints: no answer has what they name."""


class ResponsesRequest(SamplingSettings):
    """Body of /v1/responses."""

    not_honoured = parameters.RESPONSES
    input: Input
    instructions: str | None = None
    """System message before the input."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """As in `/v1/chat/completions`."""
    reasoning: Reasoning | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    """Returned unchanged."""
    include: list[Include] | None = None
    """Only `message.output_text.logprobs` has an effect: the log-probabilities of the text."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Likeliest alternatives per token, if log-probabilities are included."""
    chat_template_kwargs: dict[str, ANY_JSON] | None = None
    """As in `/v1/chat/completions`."""
    documents: Annotated[list[dict[str, ANY_JSON]], Field(max_length=1024, fail_fast=True)] | None = None
    """As in `/v1/chat/completions`."""

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer has log-probabilities."""
        return "message.output_text.logprobs" in (self.include or ())


Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Reply):
    """Text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[str] = Field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = Field(default_factory=list)


class ReasoningText(Reply):
    """Reasoning text."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(Reply):
    """Reasoning before the answer, if the server splits it."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[str] = Field(default_factory=list)
    content: list[ReasoningText]
    status: Status


class OutputMessage(Reply):
    """Message of the answer."""

    type: Literal["message"] = "message"
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(Reply):
    """Tool call of the model."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    """Id under which the function's output is sent back."""
    name: str
    arguments: str
    status: Status


class InputTokensDetails(Reply):
    """Prompt tokens taken from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Reply):
    """Tokens of reasoning, if the server splits it; counted by deltas, so accurate to a token or two."""

    reasoning_tokens: int = 0


class ResponseUsage(Reply):
    """Token counts of a request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = Field(default_factory=OutputTokensDetails)
    total_tokens: int


class IncompleteDetails(Reply):
    """Reason of an incomplete answer."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFault(Reply):
    """Error of a failed response."""

    code: Literal["server_error"] = "server_error"
    message: str


class ResponseText(Reply):
    """Requested format."""

    format: dict[str, ANY_JSON]


class ReplyReasoning(Reply):
    """Requested effort."""

    effort: str | None
    summary: None = None


OutputItem = OutputMessage | OutputCall | OutputReasoning


class ResponseReply(Reply):
    """The complete response."""

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
    output: list[OutputItem] = Field(default_factory=list)
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: ReplyReasoning | None = ABSENT
    stop_reason: int | str | None = ABSENT
    """Extension: the stop text, or the one of `stop_token_ids`, that ended the answer."""
    store: Literal[False] = False
    """Responses are not stored."""
    temperature: float
    text: ResponseText
    tool_choice: ANY_JSON = "auto"
    """As requested, and so are the tools."""
    tools: list[dict[str, ANY_JSON]] = Field(default_factory=list)
    top_logprobs: int | None = ABSENT
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


class ResponseEvent(Reply):
    """One event of a stream; its type decides which keys are present."""

    type: str
    sequence_number: int
    response: ResponseReply | None = ABSENT
    output_index: int | None = ABSENT
    content_index: int | None = ABSENT
    item_id: str | None = ABSENT
    item: OutputItem | None = ABSENT
    part: OutputText | ReasoningText | None = ABSENT
    delta: str | None = ABSENT
    text: str | None = ABSENT
    arguments: str | None = ABSENT
    logprobs: list[ChatTokenLogprob] | None = ABSENT
