"""POST /v1/responses: a conversation asked in OpenAI's newer form; nothing is kept of it."""

import asyncio
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.core import clock
from penstock.engine import request as engine
from penstock.serve.chat_request import chat_request
from penstock.serve.errors import ApiError
from penstock.serve.response_request import PARAMS, chat_of
from penstock.serve.response_writer import ResponseWriter
from penstock.serve.routes.asking import STREAMED, new_id, reply, service_of, visit_of
from penstock.serve.schema.response_reply import ReplyReasoning, ResponseEvent, ResponseReply, ResponseText
from penstock.serve.schema.responses import ResponsesRequest
from penstock.serve.served import Service
from penstock.serve.stream import EventStream
from penstock.serve.tally import Tally
from penstock.serve.tool_choice import ToolUse, tool_use

router = APIRouter()


@router.post("/v1/responses", response_model=ResponseReply, responses=STREAMED)
async def respond(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation; stateless."""
    service, visit = service_of(request), visit_of(request)
    service.check_open()
    use, asked = await asyncio.to_thread(_asked, body, service, client=visit.client)
    tally = Tally(visit.opened(service.bridge.submit([asked])))
    writer = ResponseWriter(_frame(body, asked, service), use=use)
    if body.stream:
        return EventStream(_events(writer, tally), failed=writer.failed, last="")
    async for event in _events(writer, tally):
        whole = event.response
    assert whole is not None, "the last event has the whole"
    return reply(whole)


def _asked(body: ResponsesRequest, service: Service, *, client: str) -> tuple[ToolUse, engine.Request]:
    """Return what a body asks for; it may be of 60,000 items, which is for no event loop."""
    chat = chat_of(body)
    use = tool_use(chat.tools or (), chat.tool_choice)
    try:
        return use, chat_request(chat, use, service, client=client)
    except ApiError as error:
        error.param = PARAMS.get(error.param or "", error.param)
        raise


def _frame(body: ResponsesRequest, asked: engine.Request, service: Service) -> ResponseReply:
    wanted = None if body.text is None else body.text.format
    told = {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
    choice = body.tool_choice or "auto"
    return ResponseReply(
        id=new_id("resp"),
        created_at=int(clock.unix_seconds()),
        model=body.model or service.served.name,
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
