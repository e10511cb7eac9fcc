"""What `/v1/responses` answers: items of output, and the events of a stream."""

from typing import Literal

from pydantic import Field

from penstock.serve.schema.body import ABSENT, ANY_JSON, Reply

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


class OutputCall(Reply):
    """A call that the model wants."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    """What the function's output is sent back with."""
    name: str
    arguments: str
    status: Status


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


class ReplyReasoning(Reply):
    """The effort that was asked for."""

    effort: str | None
    summary: None = None


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
    output: list[OutputMessage | OutputCall] = Field(default_factory=list)
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: ReplyReasoning | None = ABSENT
    store: Literal[False] = False
    """Nothing is kept, so no id of an answer can be asked for again."""
    temperature: float
    text: ResponseText
    tool_choice: ANY_JSON = "auto"
    """As it was asked for; so are the tools."""
    tools: list[dict[str, ANY_JSON]] = Field(default_factory=list)
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
    item: OutputMessage | OutputCall | None = ABSENT
    part: OutputText | None = ABSENT
    delta: str | None = ABSENT
    text: str | None = ABSENT
    arguments: str | None = ABSENT
    logprobs: list[float] | None = ABSENT
