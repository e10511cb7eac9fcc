"""POST /v1/chat/completions."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.core import clock
from penstock.serve.chat_request import chat_request
from penstock.serve.chat_writer import ChatWriter, joined
from penstock.serve.reasoning import reasoning_of
from penstock.serve.routes.asking import STREAMED, new_id, reply, service_of, visit_of
from penstock.serve.schema.chat import ChatRequest
from penstock.serve.schema.chat_reply import ChatChunk, ChatCompletion, ChunkChoice
from penstock.serve.stream import EventStream
from penstock.serve.tally import Tally
from penstock.serve.tool_choice import tool_use

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    service, visit = service_of(request), visit_of(request)
    service.check_open()
    use = tool_use(body.tools or (), body.tool_choice)
    asked = await asyncio.to_thread(chat_request, body, use, service, client=visit.client)
    tally = Tally(visit.opened(service.bridge.submit([asked])))
    names = service.names if body.logprobs else None
    writers = [
        ChatWriter(index, names=names, use=use, reasoning=reasoning_of(asked, service.served))
        for index in range(asked.num_answers)
    ]
    frame = ChatChunk(
        id=new_id("chatcmpl"),
        created=int(clock.unix_seconds()),
        model=body.model or service.served.name,
        choices=[],
    )
    if body.wants_stream:
        return EventStream(_chunks(frame, tally, writers, body))
    pieces: list[list[ChunkChoice]] = [[] for _ in writers]
    async for index, piece in tally:
        pieces[index].append(writers[index].take(piece))
    choices = [joined(index, of_one) for index, of_one in enumerate(pieces)]
    return reply(
        ChatCompletion(
            id=frame.id, created=frame.created, model=frame.model, choices=choices, usage=tally.usage()
        )
    )


async def _chunks(
    frame: ChatChunk, tally: Tally, writers: Sequence[ChatWriter], body: ChatRequest
) -> AsyncIterator[ChatChunk]:
    for writer in writers:
        yield frame.model_copy(update={"choices": [writer.begin()]})
    async for index, piece in tally:
        usage = tally.usage() if body.wants_running_usage else None
        yield frame.model_copy(update={"choices": [writers[index].take(piece)], "usage": usage})
    if body.wants_usage:
        yield frame.model_copy(update={"usage": tally.usage()})
