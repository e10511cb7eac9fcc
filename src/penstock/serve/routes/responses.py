"""POST /v1/responses: a conversation asked in OpenAI's newer form; nothing is kept of it."""

import asyncio
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.core import clock
from penstock.engine import request as engine
from penstock.serve.chat_request import chat_request
from penstock.serve.errors import ApiError
from penstock.serve.response_writer import ResponseWriter
from penstock.serve.routes.asking import STREAMED, new_id, reply, service_of, visit_of
from penstock.serve.schema.chat import AssistantMessage, ChatRequest, Message, SystemMessage, UserMessage
from penstock.serve.schema.generation import JsonSchema, JsonSchemaFormat, ResponseFormat
from penstock.serve.schema.responses import (
    InputMessage,
    ResponseEvent,
    ResponseReply,
    ResponsesRequest,
    ResponseText,
    SchemaFormat,
)
from penstock.serve.served import Service
from penstock.serve.stream import EventStream
from penstock.serve.tally import Tally
from penstock.serve.tool_choice import ToolUse

router = APIRouter()

_NOT_HERE = {
    "store": "Answers are not kept: leave store out, or give false.",
    "previous_response_id": "Answers are not kept: send the earlier messages in input instead.",
    "background": "Answers are made while the client waits: leave background out, or stream.",
    "tools": "Tools can be called at /v1/chat/completions only.",
    "include": "An answer has its text and nothing besides: leave include out.",
    "reasoning": "Reasoning is not told from the answer: leave reasoning out. /v1/chat/completions has "
    "reasoning_effort, for models whose chat template knows it.",
}


@router.post("/v1/responses", response_model=ResponseReply, responses=STREAMED)
async def respond(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation; stateless."""
    service, visit = service_of(request), visit_of(request)
    service.check_open()
    for key, why in _NOT_HERE.items():
        if getattr(body, key):
            raise ApiError(400, why, param=key)
    asked = await asyncio.to_thread(_request, body, service, client=visit.client)
    tally = Tally(visit.opened(service.bridge.submit([asked])))
    writer = ResponseWriter(_frame(body, asked, service), message_id=new_id("msg"))
    if body.stream:
        return EventStream(_events(writer, tally), failed=writer.failed, last="")
    async for _, piece in tally:
        for _event in writer.take(piece):
            continue
    return reply(writer.reply(tally.usage()))


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """Return the request to `/v1/chat/completions` that asks the same."""
    messages = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    instructions = (
        [] if body.instructions is None else [SystemMessage(role="system", content=body.instructions)]
    )
    return ChatRequest(
        messages=[*instructions, *map(_message, messages)],
        model=body.model,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        response_format=_format(body),
    )


def _message(given: InputMessage) -> Message:
    content = (
        given.content if isinstance(given.content, str) else "".join(part.text for part in given.content)
    )
    match given.role:
        case "user":
            return UserMessage(role="user", content=content)
        case "assistant":
            return AssistantMessage(role="assistant", content=content)
        case "system" | "developer":
            return SystemMessage(role="system", content=content)


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    wanted = None if body.text is None else body.text.format
    if not isinstance(wanted, SchemaFormat):
        return wanted
    return JsonSchemaFormat(
        type="json_schema", json_schema=JsonSchema(name=wanted.name, schema=wanted.schema_)
    )


def _request(body: ResponsesRequest, service: Service, *, client: str) -> engine.Request:
    try:
        return chat_request(chat_of(body), ToolUse(), service, client=client)
    except ApiError as error:
        error.param = _PARAMS.get(error.param or "", error.param)
        raise


_PARAMS = {
    "messages": "input",
    "prompt": "input",
    "response_format": "text",
    "max_tokens": "max_output_tokens",
}


def _frame(body: ResponsesRequest, asked: engine.Request, service: Service) -> ResponseReply:
    wanted = None if body.text is None else body.text.format
    told = {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
    return ResponseReply(
        id=new_id("resp"),
        created_at=int(clock.unix_seconds()),
        model=body.model or service.served.name,
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        temperature=asked.sampling.temperature,
        text=ResponseText(format=told),
        top_p=asked.sampling.top_p,
    )


async def _events(writer: ResponseWriter, tally: Tally) -> AsyncIterator[ResponseEvent]:
    for event in writer.begin():
        yield event
    async for _, piece in tally:
        for event in writer.take(piece):
            yield event
    for event in writer.end(tally.usage()):
        yield event
