"""POST /v1/chat/completions."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.core import clock
from penstock.engine import request as engine
from penstock.serve.chat_writer import ChatWriter, joined
from penstock.serve.errors import ApiError
from penstock.serve.prompts import chat_prompt, tools_of
from penstock.serve.requests import Asked, engine_request
from penstock.serve.routes.asking import STREAMED, new_id, reply, service_of, visit_of
from penstock.serve.schema.chat import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    ChunkChoice,
    NamedTool,
    Tool,
)
from penstock.serve.served import Service
from penstock.serve.stream import EventStream
from penstock.serve.structure import grammar_of, grammar_of_calls
from penstock.serve.tally import Tally
from penstock.serve.tool_forms import OPEN

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    service, visit = service_of(request), visit_of(request)
    service.check_open()
    tools = tools_of(body)
    _check(body, tools)
    asked = await asyncio.to_thread(_request, body, tools, service, client=visit.client)
    tally = Tally(visit.opened(service.bridge.submit([asked])))
    writers = [_writer(index, body, tools, service) for index in range(asked.num_answers)]
    frame = ChatChunk(
        id=new_id("chatcmpl"),
        created=int(clock.unix_seconds()),
        model=body.model or service.served.name,
        choices=[],
    )
    if body.wants_stream:
        return EventStream(_chunks(frame, tally, writers, wants_usage=body.wants_usage))
    pieces: list[list[ChunkChoice]] = [[] for _ in writers]
    async for index, piece in tally:
        pieces[index].append(writers[index].take(piece))
    choices = [joined(index, of_one) for index, of_one in enumerate(pieces)]
    return reply(
        ChatCompletion(
            id=frame.id, created=frame.created, model=frame.model, choices=choices, usage=tally.usage()
        )
    )


def _check(body: ChatRequest, tools: Sequence[Tool]) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs is given without logprobs: true.", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(
            400, "max_tokens and max_completion_tokens are one thing. Give one.", param="max_tokens"
        )
    if body.max_tokens == 0:
        raise ApiError(400, "max_tokens must be at least 1 (got 0).", param="max_tokens")
    has_format = body.response_format is not None and body.response_format.type != "text"
    if has_format and tools and body.tool_choice not in (None, "auto"):
        raise ApiError(
            400, "An answer is a call or follows response_format, not both.", param="response_format"
        )


def _request(body: ChatRequest, tools: list[Tool], service: Service, *, client: str) -> engine.Request:
    prompt = chat_prompt(body.messages, service, tools=tools, variables=body.chat_template_kwargs)
    template = service.served.words.template
    grammar = grammar_of_calls(
        body.tool_choice,
        tools,
        marked=OPEN in (template.source or ""),
        several=body.parallel_tool_calls is not False,
    )
    asked = Asked(
        max_tokens=body.max_tokens or body.max_completion_tokens,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar or grammar_of(body.response_format),
        stop_texts=template.stop_texts,
    )
    made = engine_request(
        body,
        prompt,
        asked,
        served=service.served,
        limits=service.limits,
        client=client,
        now_s=clock.monotonic(),
    )
    return service.checked(made)


def _writer(index: int, body: ChatRequest, tools: Sequence[Tool], service: Service) -> ChatWriter:
    forced = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    return ChatWriter(
        index,
        names=service.names if body.logprobs else None,
        tools={tool.function.name: tool.function.parameters or {} for tool in tools},
        forced=forced,
    )


async def _chunks(
    frame: ChatChunk, tally: Tally, writers: Sequence[ChatWriter], *, wants_usage: bool
) -> AsyncIterator[ChatChunk]:
    for writer in writers:
        yield frame.model_copy(update={"choices": [writer.begin()]})
    async for index, piece in tally:
        yield frame.model_copy(update={"choices": [writers[index].take(piece)]})
    if wants_usage:
        yield frame.model_copy(update={"usage": tally.usage()})
