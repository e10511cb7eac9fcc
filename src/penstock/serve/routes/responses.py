"""POST /v1/responses: OpenAI's newer conversation API, stateless.

An answer is a list of items (reasoning, messages, calls), one of which is open at a time:

    created, in_progress
    output_item.added, content_part.added, reasoning_text.delta...          reasoning
        reasoning_text.done, content_part.done, output_item.done
    output_item.added, content_part.added, output_text.delta...             a message
        output_text.done, content_part.done, output_item.done
    output_item.added, function_call_arguments.delta...                     a call
        function_call_arguments.done, output_item.done
    completed or incomplete, with the whole response
"""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.core import clock
from penstock.engine import request as engine
from penstock.engine.request import OutputDelta
from penstock.serve.chat.json_scan import is_object
from penstock.serve.chat.reasoning import reasoning_of
from penstock.serve.chat.request import chat_request
from penstock.serve.chat.response_format import call_form, unmarked_json
from penstock.serve.chat.tools import ToolUse, tool_use
from penstock.serve.chat.writer import ChatWriter
from penstock.serve.errors import ApiError
from penstock.serve.output_stream import UsageCounter
from penstock.serve.routes.dependencies import STREAMED, new_id, reply, service_of, telling, visit_of
from penstock.serve.schema.base import JsonSchema, JsonSchemaFormat, ResponseFormat, SamplingSettings, Usage
from penstock.serve.schema.chat import (
    AllowedChoice,
    AllowedTools,
    AssistantMessage,
    CalledFunction,
    ChatRequest,
    ChatTokenLogprob,
    DeltaToolCall,
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
from penstock.serve.schema.responses import (
    AllowedFunctions,
    IncompleteDetails,
    InputCall,
    InputCallOutput,
    InputItem,
    InputMessage,
    InputReasoning,
    InputTokensDetails,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    ReasoningText,
    ReplyReasoning,
    ResponseEvent,
    ResponseFault,
    ResponseReply,
    ResponsesRequest,
    ResponseText,
    ResponseTool,
    ResponseToolChoice,
    ResponseUsage,
    SchemaFormat,
    Status,
    Texts,
)
from penstock.serve.sse import EventStream
from penstock.serve.state import AppState, ModelInfo

router = APIRouter()


@router.post("/v1/responses", response_model=ResponseReply, responses=STREAMED)
async def respond(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation; stateless."""
    service, visit = service_of(request), visit_of(request)
    service.check_open()
    use, asked, missed = await asyncio.to_thread(_asked, body, service, client=visit.client)
    tally = UsageCounter(visit.opened(service.bridge.submit([asked])))
    served = service.served.of(body.model)
    writer = ResponseWriter(
        _frame(body, asked, served),
        ChatWriter(
            0,
            names=served.names if body.wants_logprobs else None,
            use=use,
            unmarked=unmarked_json(asked.grammar, use, call_form(served.text_processor.template)),
            reasoning=reasoning_of(asked, served),
            stop_ids=frozenset(body.stop_token_ids or ()),
            streams=bool(body.stream),
        ),
    )
    if body.stream:
        return telling(missed, EventStream(_events(writer, tally), failed=writer.failed, last=""))
    async for event in _events(writer, tally):
        whole = event.response
    assert whole is not None, "the last event has the whole response"
    return telling(missed, reply(whole))


def _asked(
    body: ResponsesRequest, service: AppState, *, client: str
) -> tuple[ToolUse, engine.Request, tuple[str, ...]]:
    """Return tools, engine request and keywords that are not enforced of a body.

    It has up to 60,000 items, so this is not for the event loop.
    """
    chat = chat_of(body)
    use = tool_use(chat.tools or (), chat.tool_choice)
    try:
        asked, missed = chat_request(chat, use, service, client=client)
        return use, asked, tuple(map(_in_own_keys, missed))
    except ApiError as error:
        error.param = PARAMS.get(error.param or "", error.param)
        error.args = (_in_own_keys(str(error)),)
        raise


def _in_own_keys(text: str) -> str:
    """Return a message with the paths of schemas that this API has.

    >>> _in_own_keys("not at tools[3].function.parameters.properties.d")
    'not at tools[3].parameters.properties.d'
    """
    text = text.replace("response_format.json_schema.schema", "text.format.schema")
    return _FUNCTION_KEY.sub(r"\1", text)


def _frame(body: ResponsesRequest, asked: engine.Request, served: ModelInfo) -> ResponseReply:
    wanted = None if body.text is None else body.text.format
    told = {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
    choice = body.tool_choice or "auto"
    return ResponseReply(
        id=new_id("resp"),
        created_at=int(clock.unix_seconds()),
        model=served.name,
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=None if body.reasoning is None else ReplyReasoning(effort=body.reasoning.effort),
        temperature=asked.sampling.temperature,
        text=ResponseText(format=told),
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        tools=[tool.model_dump() for tool in body.tools or ()],
        top_logprobs=body.top_logprobs,
        top_p=asked.sampling.top_p,
    )


class ResponseWriter:
    """Writes the response of one answer, as events.

    Args:
        frame: the response without output.
        answer: writes the answer as chunks of a chat.
    """

    def __init__(self, frame: ResponseReply, answer: ChatWriter) -> None:
        self._frame, self._answer = frame, answer
        self._done: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._said: list[str] = []
        """Text parts of the open item."""
        self._logprobs: list[ChatTokenLogprob] = []
        """Log-probabilities of the open item."""
        self._waiting: list[ChatTokenLogprob] = []
        """Log-probabilities of tokens whose text is held back."""
        self._num_thought = 0
        self._is_cut = False
        self._stop: int | str | None = None
        self._num_events = 0

    def begin(self) -> Iterator[ResponseEvent]:
        """Yield the events before any output."""
        yield self._event("created", response=self._frame)
        yield self._event("in_progress", response=self._frame)

    def take(self, piece: OutputDelta) -> Iterator[ResponseEvent]:
        """Yield the events of one delta, possibly none."""
        self._is_cut |= piece.finish == "length"
        chunk = self._answer.take(piece)
        self._stop = chunk.stop_reason
        delta = chunk.delta
        if isinstance(self._open, OutputReasoning):
            self._waiting = []  # the closing tag has no text
        self._waiting += (chunk.logprobs.content or ()) if chunk.logprobs is not None else ()
        if delta.reasoning_content:
            self._num_thought += len(piece.token_ids)
            yield from self._think(delta.reasoning_content)
        calls = delta.tool_calls or []
        num_old = len([call for call in calls if call.id is None])  # 1 if an open call continues
        for call in calls[:num_old]:
            yield from self._call(call)
        if delta.content:
            yield from self._write(delta.content)
        for call in calls[num_old:]:
            yield from self._call(call)

    def end(self, usage: Usage) -> Iterator[ResponseEvent]:
        """Yield the events after the last delta; the last one has the whole response."""
        status: Status = "incomplete" if self._is_cut else "completed"
        if self._open is None and not self._done:
            yield from self._open_message()
        yield from self._close(status)
        reply = self._frame.model_copy(
            update={
                "status": status,
                "incomplete_details": IncompleteDetails() if self._is_cut else None,
                "output": self._done,
                "stop_reason": self._stop,
                "usage": _usage(usage, self._num_thought),
            }
        )
        yield self._event(status, response=reply)

    def failed(self, error: ApiError) -> ResponseEvent:
        """Return the last event of a failed stream."""
        fault = ResponseFault(message=str(error))
        reply = self._frame.model_copy(update={"status": "failed", "error": fault})
        return self._event("failed", response=reply)

    def _write(self, text: str) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, OutputMessage):
            yield from self._open_message()
        self._said.append(text)
        logprobs, self._waiting = self._waiting, []
        self._logprobs += logprobs
        yield self._item_event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _think(self, text: str) -> Iterator[ResponseEvent]:
        self._waiting = []
        if not isinstance(self._open, OutputReasoning):
            yield from self._close("completed")
            item_id = f"rs-{secrets.token_hex(12)}"
            yield self._opened(OutputReasoning(id=item_id, status="in_progress", content=[]))
            yield self._item_event("content_part.added", content_index=0, part=ReasoningText(text=""))
        self._said.append(text)
        yield self._item_event("reasoning_text.delta", content_index=0, delta=text)

    def _call(self, call: DeltaToolCall) -> Iterator[ResponseEvent]:
        self._waiting = []
        if call.id is not None:
            yield from self._close("completed")
            item_id, name = f"fc-{secrets.token_hex(12)}", call.function.name or ""
            yield self._opened(
                OutputCall(id=item_id, call_id=call.id, name=name, arguments="", status="in_progress")
            )
        if call.function.arguments:
            self._said.append(call.function.arguments)
            yield self._item_event("function_call_arguments.delta", delta=call.function.arguments)

    def _open_message(self) -> Iterator[ResponseEvent]:
        yield from self._close("completed")
        item_id = f"msg-{secrets.token_hex(12)}"
        yield self._opened(OutputMessage(id=item_id, status="in_progress", content=[]))
        yield self._item_event("content_part.added", content_index=0, part=OutputText(text=""))

    def _opened(self, item: OutputItem) -> ResponseEvent:
        self._open, self._said, self._logprobs = item, [], []
        return self._event("output_item.added", output_index=len(self._done), item=item)

    def _close(self, status: Status) -> Iterator[ResponseEvent]:
        """Yield the closing events of the open item, if there is one."""
        item, text = self._open, "".join(self._said)
        if item is None:
            return
        if isinstance(item, OutputMessage):
            part = OutputText(text=text, logprobs=self._logprobs)
            yield self._item_event("output_text.done", content_index=0, text=text, logprobs=self._logprobs)
            yield self._item_event("content_part.done", content_index=0, part=part)
            item = item.model_copy(update={"status": status, "content": [part]})
        elif isinstance(item, OutputReasoning):
            thought = ReasoningText(text=text)
            yield self._item_event("reasoning_text.done", content_index=0, text=text)
            yield self._item_event("content_part.done", content_index=0, part=thought)
            item = item.model_copy(update={"status": status, "content": [thought]})
        else:
            yield self._item_event("function_call_arguments.done", arguments=text)
            status = "completed" if is_object(text) else "incomplete"
            item = item.model_copy(update={"status": status, "arguments": text})
        yield self._event("output_item.done", output_index=len(self._done), item=item)
        self._open = None
        self._done.append(item)

    def _item_event(self, kind: str, **fields: Any) -> ResponseEvent:  # Any: fields of ResponseEvent
        assert self._open is not None
        return self._event(kind, item_id=self._open.id, output_index=len(self._done), **fields)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:  # as above
        event = ResponseEvent(type=f"response.{kind}", sequence_number=self._num_events, **fields)
        self._num_events += 1
        return event


async def _events(writer: ResponseWriter, tally: UsageCounter) -> AsyncIterator[ResponseEvent]:
    for event in writer.begin():
        yield event
    async for _, piece in tally:
        for event in writer.take(piece):
            yield event
    for event in writer.end(tally.usage()):
        yield event


PARAMS = {
    "messages": "input",
    "prompt": "input",
    "response_format": "text",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
"""Keys of the chat API -> keys of this one, for error messages."""

_FUNCTION_KEY = re.compile(r"(tools\[\d+\])\.function(?=\.parameters)")
_SHARED = (*SamplingSettings.model_fields, "chat_template_kwargs", "documents", "parallel_tool_calls")
"""Keys that mean the same in both."""


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """Convert a body to a chat request.

    Raises:
        ApiError: it has the output of an unknown call.
    """
    items = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    instructions = (
        [] if body.instructions is None else [SystemMessage(role="system", content=body.instructions)]
    )
    return ChatRequest(
        **{key: getattr(body, key) for key in _SHARED},
        messages=[*instructions, *turns_of(items)],
        max_completion_tokens=body.max_output_tokens,
        response_format=_format(body),
        tools=[_tool(tool) for tool in body.tools or ()],
        tool_choice=_choice(body.tool_choice),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        logprobs=body.wants_logprobs or None,
        top_logprobs=body.top_logprobs if body.wants_logprobs else None,
    )


def turns_of(items: Iterable[InputItem]) -> list[Message]:
    """Return the messages of a conversation; calls are part of the turn that made them.

    Raises:
        ApiError: an output has no call before it.
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
                        f"input has the output of a call {item.call_id!r} that is not before it. Send the "
                        "function_call too: responses are not stored.",
                        param="input",
                    )
                output, name = _text(item.output), names[item.call_id]
                turns.append(ToolMessage(role="tool", content=output, tool_call_id=item.call_id, name=name))
            case InputMessage():
                _add_message(turns, _message(item))
            case InputReasoning():
                thought = "".join(part.text for part in item.content or ())
                turns.append(AssistantMessage(role="assistant", reasoning_content=thought or None))
    return turns


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
    """Append a message; content that follows the calls of an answer belongs to the same turn."""
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
        named = [Tool(type="function", function=Function(name=tool.name)) for tool in given.tools]
        allowed = AllowedTools(mode=given.mode, tools=named)
        return AllowedChoice(type="allowed_tools", allowed_tools=allowed)
    return NamedTool(type="function", function=NamedFunction(name=given.name))


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    wanted = None if body.text is None else body.text.format
    if not isinstance(wanted, SchemaFormat):
        return wanted
    return JsonSchemaFormat(
        type="json_schema",
        json_schema=JsonSchema(name=wanted.name, schema=wanted.schema_, strict=wanted.strict),
    )


def _usage(usage: Usage, num_thought: int) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=num_thought),
        total_tokens=usage.total_tokens,
    )
