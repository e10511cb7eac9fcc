"""Schema of /v1/chat/completions: bodies, replies and the chunks of a stream."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from penstock.serve import parameters
from penstock.serve.schema.base import (
    ABSENT,
    ANY_JSON,
    FIRST,
    RETURNED,
    Body,
    Generation,
    Name,
    OneOf,
    PromptLogprobs,
    Reply,
    Settings,
    Usage,
)


class TextPart(Body):
    """A text part of a message; other parts are not supported."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: ANY_JSON = RETURNED


Content = Annotated[
    str | Annotated[list[TextPart], FIRST],
    OneOf('a text or a list of {"type": "text", "text": ...}; there are no other parts'),
]


class SystemMessage(Body):
    """System message."""

    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(Body):
    """User message."""

    role: Literal["user"]
    content: Content
    name: Name | None = None


class CalledFunction(Body):
    """Function name, and arguments as JSON text."""

    name: Name
    arguments: str
    parsed_arguments: ANY_JSON = RETURNED


class ToolCall(Body):
    """Tool call of an earlier answer."""

    id: Name
    type: Literal["function"]
    function: CalledFunction
    index: int | None = RETURNED


class AssistantMessage(Body):
    """Earlier answer of the model."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], FIRST] | None = None
    name: Name | None = None
    reasoning_content: str | None = None
    """Extension: reasoning, for templates that use it, such as Qwen 3's."""
    reasoning: str | None = None
    """Same as `reasoning_content`, as in vLLM."""
    thinking: str | None = None
    """Same as `reasoning_content`, as in gpt-oss' templates."""
    refusal: None = RETURNED
    annotations: list[ANY_JSON] | None = RETURNED
    audio: None = RETURNED
    function_call: None = RETURNED
    parsed: ANY_JSON = RETURNED


class ToolMessage(Body):
    """Result of a function."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Name
    name: Name | None = None
    """Function name; not in the API, but in its examples, and templates use it."""


class CustomMessage(Body):
    """Extension: a role that the model's chat template defines."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Content
    name: Name | None = None


_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def _kind_of_message(message: object) -> str | None:
    role = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
    return (role if role in _ROLES else "custom") if isinstance(role, str) else None


Message = Annotated[
    Annotated[SystemMessage, Tag("system")]
    | Annotated[SystemMessage, Tag("developer")]
    | Annotated[UserMessage, Tag("user")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[ToolMessage, Tag("tool")]
    | Annotated[CustomMessage, Tag("custom")],
    Discriminator(
        _kind_of_message, custom_error_type="one_of", custom_error_message="Must be a message with a 'role'"
    ),
]


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Body):
    """Function that may be called."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, ANY_JSON] | None = None
    """JSON schema of an object; default: no arguments."""
    strict: bool | None = None
    """true: refuse keywords that cannot be enforced if a call is required; else the header
    X-Penstock-Not-Enforced names them. An optional call need not follow the schema."""


class Tool(Body):
    """Tool; functions only."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """Name of a function."""

    name: Name


class NamedTool(Body):
    """Function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """Subset of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128, fail_fast=True)]
    """Only their names matter."""


class AllowedChoice(Body):
    """Restricts calls to a subset of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedChoice,
    OneOf(
        '"none", "auto", "required", {"type": "function", "function": {"name": ...}}, or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
    ),
]


class ChatRequest(Generation):
    """Body of /v1/chat/completions."""

    not_honoured = parameters.CHAT
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """Newer name of `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """false: at most one call if a call is required; optional calls are not limited."""
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Name | None = None
    """Variable of the chat template; without effect if the template does not use it."""

    # Extensions under vLLM's names.
    chat_template_kwargs: dict[str, ANY_JSON] | None = None
    """Variables of the chat template, such as `enable_thinking`."""
    documents: Annotated[list[dict[str, ANY_JSON]], Field(max_length=1024, fail_fast=True)] | None = None
    """Variable of the chat template, used by Granite."""
    add_generation_prompt: bool | None = None
    """false: leave out the start of an answer, so that the model chooses the next speaker."""
    continue_final_message: bool | None = None
    """Continue the last message, which must be the assistant's, instead of starting an answer."""
    echo: bool | None = None
    """Repeat the last message before the answer, if it is the assistant's."""


class TopLogprob(Reply):
    """An alternative token."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    """Log-probability of a sampled token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    """Log-probabilities of an answer."""

    content: list[ChatTokenLogprob] | None
    refusal: None = None


class ReplyFunction(Reply):
    """Function name and arguments of a call."""

    name: str
    arguments: str


class ReplyToolCall(Reply):
    """Tool call of the model."""

    id: str
    type: Literal["function"] = "function"
    function: ReplyFunction


class ReplyMessage(Reply):
    """Message of the answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = ABSENT
    """Extension, as in DeepSeek's API: the reasoning before the answer, if the server splits it."""
    refusal: None = None
    tool_calls: list[ReplyToolCall] | None = ABSENT


ChatFinish = Literal["stop", "length", "tool_calls"]


class ChatChoice(Reply):
    """One answer."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish
    stop_reason: int | str | None = ABSENT
    """Extension: the stop text, or the one of `stop_token_ids`, that ended the answer."""
    token_ids: list[int] | None = ABSENT


class ChatCompletion(Reply):
    """All answers."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = ABSENT
    prompt_token_ids: list[int] | None = ABSENT


class DeltaFunction(Reply):
    """New text of a call's function."""

    name: str | None = ABSENT
    arguments: str


class DeltaToolCall(Reply):
    """New part of a tool call; the first one has its id and name."""

    index: int
    id: str | None = ABSENT
    type: Literal["function"] | None = ABSENT
    function: DeltaFunction


class Delta(Reply):
    """New part of a message."""

    role: Literal["assistant"] | None = ABSENT
    content: str | None = ABSENT
    reasoning_content: str | None = ABSENT
    tool_calls: list[DeltaToolCall] | None = ABSENT


class ChunkChoice(Reply):
    """New part of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    stop_reason: int | str | None = ABSENT
    """Extension: the stop text, or the one of `stop_token_ids`, that ended the answer."""
    token_ids: list[int] | None = ABSENT


class ChatChunk(Reply):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = ABSENT
    prompt_token_ids: list[int] | None = ABSENT
    """In the first chunk only."""


class TokenizeRequest(Settings):
    """A text, or a conversation rendered by the chat template."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    model: Name | None = None
    add_special_tokens: bool = True
    """Add the model's start tokens; conversations have those of the template."""
    add_generation_prompt: bool | None = None
    """For conversations, as in `/v1/chat/completions`; also the keys below."""
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    chat_template_kwargs: dict[str, ANY_JSON] | None = None
    return_token_strs: bool | None = None
    """Also return the vocabulary's spelling of each token."""
