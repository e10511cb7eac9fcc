"""`/v1/responses`: OpenAI's newer form of a conversation, as a server has it that keeps nothing."""

from typing import Annotated, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag

from penstock.serve.schema.body import ANY_JSON, FIRST, RETURNED, Body, Name, OneOf
from penstock.serve.schema.chat import FunctionName
from penstock.serve.schema.formats import JsonObjectFormat, TextFormat

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(Body):
    """A part of a message; what an answer had besides its text may be sent back with it."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[ANY_JSON] | None = None
    logprobs: list[ANY_JSON] | None = None
    parsed: ANY_JSON = RETURNED


Texts = Annotated[
    str | Annotated[list[InputText], FIRST],
    OneOf('a text or a list of {"type": "input_text", "text": ...}'),
]


class InputMessage(Body):
    """A turn, also one that was an answer."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Texts
    type: Literal["message"] | None = None
    id: Name | None = None
    status: ItemStatus | None = None
    phase: str | None = RETURNED


class InputCall(Body):
    """A function that the model wanted called."""

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
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Texts
    id: Name | None = None
    status: ItemStatus | None = None
    name: Name | None = RETURNED
    caller: None = RETURNED
    namespace: None = RETURNED


def _kind_of_item(item: object) -> str | None:
    """Return the type of an item; messages need not say theirs."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message" if kind is None else None


def _kind_of_input(given: object) -> str | None:
    return "text" if isinstance(given, str) else "items" if isinstance(given, list) else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")],
    Discriminator(
        _kind_of_item,
        custom_error_type="one_of",
        custom_error_message='Must have the type "message", "function_call" or "function_call_output"; there '
        "are no other items",
    ),
]
Input = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), Tag("items")],
    Discriminator(
        _kind_of_input, custom_error_type="one_of", custom_error_message="Must be a text or a list of items"
    ),
]


class ResponseTool(Body):
    """A function that may be called; there are no tools of the server's own."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, ANY_JSON] | None = None
    """A JSON schema of an object; left out: no arguments."""
    strict: bool | None = None
    """As in `/v1/chat/completions`."""


class NamedFunction(Body):
    """Call this one."""

    type: Literal["function"]
    name: Name


class AllowedFunctions(Body):
    """Call none but these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseTool], Field(min_length=1, max_length=128, fail_fast=True)]
    """By their names; whatever else is said of them here is without effect."""


ResponseToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions,
    OneOf(
        '"none", "auto", "required", {"type": "function", "name": ...}, or '
        '{"type": "allowed_tools", "mode": "auto" or "required", "tools": [...]}'
    ),
]


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


class Reasoning(Body):
    """How much a model is to reason."""

    effort: Name | None = None
    """As `reasoning_effort` in `/v1/chat/completions`."""
    summary: str | None = None
    """Refused: reasoning is not told from the answer."""


class ResponseStreamOptions(Body):
    """Accepted, without effect."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Body):
    """What is asked."""

    model: Name | None = None
    input: Input
    instructions: str | None = None
    """Come first, as the system's."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """As in `/v1/chat/completions`."""
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: dict[str, str] | None = None
    """Sent back."""

    # Refused where they ask for something, with what to do instead.
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    # Accepted, without effect.
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
