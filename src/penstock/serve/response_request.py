"""From the body of `/v1/responses` to that of `/v1/chat/completions` that asks the same; pure."""

from collections.abc import Iterable

from penstock.serve.errors import ApiError
from penstock.serve.schema.chat import (
    AllowedChoice,
    AllowedTools,
    AssistantMessage,
    CalledFunction,
    ChatRequest,
    Function,
    Message,
    NamedFunction,
    NamedTool,
    SystemMessage,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMessage,
    UserMessage,
)
from penstock.serve.schema.formats import JsonSchema, JsonSchemaFormat, ResponseFormat
from penstock.serve.schema.responses import (
    AllowedFunctions,
    InputCall,
    InputCallOutput,
    InputItem,
    InputMessage,
    ResponsesRequest,
    ResponseTool,
    ResponseToolChoice,
    SchemaFormat,
    Texts,
)

PARAMS = {
    "messages": "input",
    "prompt": "input",
    "response_format": "text",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""What the one calls the other's keys."""

_NOT_HERE = {
    "store": "Answers are not kept: leave store out, or give false.",
    "previous_response_id": "Answers are not kept: send the earlier items in input instead.",
    "background": "Answers are made while the client waits: leave background out, or stream.",
    "include": "An answer has its text and calls, and nothing besides: leave include out.",
}


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """Return the conversation that a body asks to be answered.

    Raises:
        ApiError: it asks for what a server that keeps nothing has not, or has the output of a call that is
            not there.
    """
    _check(body)
    items = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    instructions = (
        [] if body.instructions is None else [SystemMessage(role="system", content=body.instructions)]
    )
    return ChatRequest(
        messages=[*instructions, *turns_of(items)],
        model=body.model,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        response_format=_format(body),
        tools=[_tool(tool) for tool in body.tools or ()],
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )


def turns_of(items: Iterable[InputItem]) -> list[Message]:
    """Return the messages of a conversation: calls are part of the turn that made them.

    Raises:
        ApiError: an output is that of no call before it.
    """
    turns: list[Message] = []
    names: dict[str, str] = {}
    for item in items:
        match item:
            case InputCall():
                names[item.call_id] = item.name
                _add_call(turns, item)
            case InputCallOutput():
                if item.call_id not in names:
                    raise ApiError(
                        400,
                        f"input has the output of a call {item.call_id!r} that is not before it. Send the "
                        "function_call too: answers are not kept.",
                        param="input",
                    )
                output, name = _text(item.output), names[item.call_id]
                turns.append(ToolMessage(role="tool", content=output, tool_call_id=item.call_id, name=name))
            case InputMessage():
                _add_message(turns, _message(item))
    return turns


def _check(body: ResponsesRequest) -> None:
    for key, why in _NOT_HERE.items():
        if getattr(body, key):
            raise ApiError(400, why, param=key)
    if body.truncation == "auto":
        raise ApiError(
            400,
            "Nothing of a conversation is left out: leave truncation out, or shorten input.",
            param="truncation",
        )
    if body.reasoning is not None and body.reasoning.summary is not None:
        raise ApiError(
            400, "Reasoning is not told from the answer: leave its summary out.", param="reasoning.summary"
        )


def _add_call(turns: list[Message], item: InputCall) -> None:
    function = CalledFunction(name=item.name, arguments=item.arguments)
    call = ToolCall(id=item.call_id, type="function", function=function)
    last = turns[-1] if turns else None
    if isinstance(last, AssistantMessage) and last.tool_calls:
        last.tool_calls.append(call)
    elif isinstance(last, AssistantMessage):
        turns[-1] = last.model_copy(update={"tool_calls": [call]})
    else:
        turns.append(AssistantMessage(role="assistant", tool_calls=[call]))


def _add_message(turns: list[Message], message: Message) -> None:
    """Append a message; words that an answer has after its calls are of the same turn."""
    last = turns[-1] if turns else None
    if isinstance(message, AssistantMessage) and isinstance(last, AssistantMessage) and last.content is None:
        turns[-1] = last.model_copy(update={"content": message.content})
    else:
        turns.append(message)


def _message(item: InputMessage) -> Message:
    content = _text(item.content)
    match item.role:
        case "user":
            return UserMessage(role="user", content=content)
        case "assistant":
            return AssistantMessage(role="assistant", content=content)
        case "system" | "developer":
            return SystemMessage(role="system", content=content)


def _text(given: Texts) -> str:
    return given if isinstance(given, str) else "".join(part.text for part in given)


def _tool(given: ResponseTool) -> Tool:
    function = Function(
        name=given.name, description=given.description, parameters=given.parameters, strict=given.strict
    )
    return Tool(type="function", function=function)


def _choice(given: ResponseToolChoice | None) -> ToolChoice | None:
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, AllowedFunctions):
        allowed = AllowedTools(mode=given.mode, tools=[_tool(tool) for tool in given.tools])
        return AllowedChoice(type="allowed_tools", allowed_tools=allowed)
    return NamedTool(type="function", function=NamedFunction(name=given.name))


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    wanted = None if body.text is None else body.text.format
    if not isinstance(wanted, SchemaFormat):
        return wanted
    return JsonSchemaFormat(
        type="json_schema", json_schema=JsonSchema(name=wanted.name, schema=wanted.schema_)
    )
