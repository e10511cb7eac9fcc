"""POST /v1/chat/completions."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.core import clock
from penstock.serve.chat.prompt import echo_of
from penstock.serve.chat.reasoning import reasoning_of
from penstock.serve.chat.request import chat_request
from penstock.serve.chat.response_format import call_form, unmarked_json
from penstock.serve.chat.tools import tool_use
from penstock.serve.chat.writer import ChatWriter, joined
from penstock.serve.output_stream import UsageCounter
from penstock.serve.routes.dependencies import STREAMED, new_id, reply, service_of, telling, visit_of
from penstock.serve.schema.base import PromptLogprobs
from penstock.serve.schema.chat import ChatChunk, ChatCompletion, ChatRequest, ChunkChoice
from penstock.serve.sse import EventStream

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    service, visit = service_of(request), visit_of(request)
    service.check_open()
    use = tool_use(body.tools or (), body.tool_choice)
    asked, missed = await asyncio.to_thread(chat_request, body, use, service, client=visit.client)
    tally = UsageCounter(visit.opened(service.bridge.submit([asked])))
    served = service.served.of(body.model)
    names = served.names if body.logprobs else None
    writers = [
        ChatWriter(
            index,
            names=names,
            use=use,
            unmarked=unmarked_json(asked.grammar, use, call_form(served.text_processor.template)),
            reasoning=reasoning_of(asked, served),
            echo=echo_of(body),
            as_ids=bool(body.return_tokens_as_token_ids),
            wants_ids=bool(body.return_token_ids),
            stop_ids=frozenset(body.stop_token_ids or ()),
            streams=body.wants_stream,
        )
        for index in range(asked.num_answers)
    ]
    frame = ChatChunk(
        id=new_id("chatcmpl"),
        created=int(clock.unix_seconds()),
        model=served.name,
        choices=[],
    )
    prompt_ids = list(asked.prompt) if body.return_token_ids else None
    if body.wants_stream:
        return telling(missed, EventStream(_chunks(frame, tally, writers, body, prompt_ids)))
    deltas: list[list[ChunkChoice]] = [[writer.begin()] for writer in writers]
    prompt_logprobs: PromptLogprobs | None = None
    async for index, delta in tally:
        deltas[index].append(writers[index].take(delta))
        if delta.prompt_logprobs is not None:
            prompt_logprobs = served.names.for_prompt(delta.prompt_logprobs)
    choices = [joined(index, of_one) for index, of_one in enumerate(deltas)]
    return telling(
        missed,
        reply(
            ChatCompletion(
                id=frame.id,
                created=frame.created,
                model=frame.model,
                choices=choices,
                usage=tally.usage(),
                prompt_logprobs=prompt_logprobs,
                prompt_token_ids=prompt_ids,
            )
        ),
    )


async def _chunks(
    frame: ChatChunk,
    tally: UsageCounter,
    writers: Sequence[ChatWriter],
    body: ChatRequest,
    prompt_ids: list[int] | None,
) -> AsyncIterator[ChatChunk]:
    usage = tally.usage() if body.wants_running_usage else None
    for writer in writers:
        begin = {"choices": [writer.begin()], "usage": usage, "prompt_token_ids": prompt_ids}
        yield frame.model_copy(update=begin)
        prompt_ids = None
    async for index, delta in tally:
        usage = tally.usage() if body.wants_running_usage else None
        yield frame.model_copy(update={"choices": [writers[index].take(delta)], "usage": usage})
    if body.wants_usage:
        yield frame.model_copy(update={"usage": tally.usage()})
