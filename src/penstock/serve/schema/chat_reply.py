"""What `/v1/chat/completions` answers: messages, and what the chunks of a stream add to them."""

from typing import Literal

from penstock.serve.schema.body import ABSENT, Reply
from penstock.serve.schema.generation import Usage


class TopLogprob(Reply):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token that came."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    """How likely each token was."""

    content: list[TokenLogprob] | None
    refusal: None = None


class ReplyFunction(Reply):
    """The function to call."""

    name: str
    arguments: str


class ReplyToolCall(Reply):
    """A call that the model wants."""

    id: str
    type: Literal["function"] = "function"
    function: ReplyFunction


class ReplyMessage(Reply):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = ABSENT
    """Beyond the API, as DeepSeek's has it: what the model thought before, where that is told apart."""
    refusal: None = None
    tool_calls: list[ReplyToolCall] | None = ABSENT


ChatFinish = Literal["stop", "length", "tool_calls"]


class ChatChoice(Reply):
    """One answer."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish


class ChatCompletion(Reply):
    """All answers."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class DeltaFunction(Reply):
    """What a chunk adds to a call."""

    name: str | None = ABSENT
    arguments: str


class DeltaToolCall(Reply):
    """Which call a chunk adds to; the first of a call names it."""

    index: int
    id: str | None = ABSENT
    type: Literal["function"] | None = ABSENT
    function: DeltaFunction


class Delta(Reply):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = ABSENT
    content: str | None = ABSENT
    reasoning_content: str | None = ABSENT
    tool_calls: list[DeltaToolCall] | None = ABSENT


class ChunkChoice(Reply):
    """What a chunk adds to an answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None


class ChatChunk(Reply):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = ABSENT
