"""`/v1/chat/completions`: a conversation whose next message is asked for."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.serve.schema.body import ANY_JSON, FIRST, RETURNED, Body, Name, OneOf
from penstock.serve.schema.generation import Generation


class TextPart(Body):
    """A part of a message; there are no others than text."""

    type: Literal["text"]
    text: str


Content = Annotated[
    str | Annotated[list[TextPart], FIRST],
    OneOf('a text or a list of {"type": "text", "text": ...}; there are no other parts'),
]


class SystemMessage(Body):
    """Instructions."""

    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(Body):
    """What a user says."""

    role: Literal["user"]
    content: Content
    name: Name | None = None


class CalledFunction(Body):
    """Which function, and its arguments as JSON in a text."""

    name: Name
    arguments: str
    parsed_arguments: ANY_JSON = RETURNED


class ToolCall(Body):
    """A function that the model wanted called."""

    id: Name
    type: Literal["function"]
    function: CalledFunction
    index: int | None = RETURNED


class AssistantMessage(Body):
    """What the model said before."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], FIRST] | None = None
    name: Name | None = None
    reasoning_content: str | None = None
    """Beyond the API: for templates that know it, such as Qwen 3's."""
    refusal: None = RETURNED
    annotations: list[ANY_JSON] | None = RETURNED
    audio: None = RETURNED
    function_call: None = RETURNED
    parsed: ANY_JSON = RETURNED


class ToolMessage(Body):
    """What a function returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Name
    name: Name | None = None
    """Of the function; not in the API, but in its examples, and templates use it."""


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Body):
    """What may be called."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, ANY_JSON] | None = None
    """A JSON schema of an object; left out: no arguments."""
    strict: bool | None = None
    """Without effect: a call that is asked for always follows the schema, one that is not never must."""


class Tool(Body):
    """A function."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """Which function."""

    name: Name


class NamedTool(Body):
    """Call this one."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128, fail_fast=True)]
    """By their names; whatever else is said of them here is without effect."""


class AllowedChoice(Body):
    """Call none but these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedChoice,
    OneOf(
        '"none", "auto", "required", {"type": "function", "function": {"name": ...}}, or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
    ),
]

TemplateValue = Annotated[bool | int | float | str, OneOf("true, false, a number or a text")]


class ChatRequest(Generation):
    """What is asked."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """false: an answer that must be calls is one; a model that is free to call may still make several."""
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Name | None = None
    """A variable of the model's chat template; refused where the template does not know it."""

    # Beyond the API, under vLLM's names.
    chat_template_kwargs: dict[str, TemplateValue] | None = None
    """Variables of the model's chat template, such as `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """false: what begins an answer is left out, so the model says who speaks next."""
    continue_final_message: bool | None = None
    """The answer goes on with the last message, which is the assistant's; so has a model its first words."""
    add_special_tokens: Literal[False] | None = None
    """The template writes them."""
    echo: Literal[False] | None = None
