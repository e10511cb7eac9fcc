"""Routes of checkpoints as models: which there are, a chat with one, and prompts answered by several.

Answers come as server-sent events, each with a JSON object: `text` adds to the answer, `answers` has those of
one checkpoint, `error` says in one sentence why there is none, and `end` is the last.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from penstock.console.access import refusal
from penstock.console.models.checkpoints import steps_of
from penstock.console.models.open import MOST_CONTEXT, open_answering
from penstock.console.models.slot import ModelKey
from penstock.console.runs.discover import FoundRun
from penstock.console.state import ConsoleState, console_of, run_of
from penstock.core.errors import PenstockError
from penstock.engine.sampling_params import Params, Sampling
from penstock.text.chat_template import Message

if TYPE_CHECKING:
    from penstock.engine.llm import LLM
    from penstock.engine.request import Request as EngineRequest

router = APIRouter(prefix="/api")

_MOST_MESSAGES = 200
_MOST_CHARACTERS = 200_000
_MOST_PROMPTS = 10
_MOST_CHECKPOINTS = 8

Text = Annotated[str, StringConstraints(max_length=_MOST_CHARACTERS)]


class ChatMessage(BaseModel):
    """Message of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: Text


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")

    mode: Literal["chat", "text"] = "chat"
    """chat: the run's chat template is applied; text: the prompt is continued as it is."""
    max_tokens: int = Field(default=256, ge=1, le=MOST_CONTEXT)
    temperature: float = Field(default=0.8, ge=0, le=10, allow_inf_nan=False)


class ChatAsked(_Asked):
    """Conversation, or a text to continue, and the checkpoint that answers."""

    step: int
    messages: list[ChatMessage] = Field(min_length=1, max_length=_MOST_MESSAGES)
    """With mode "text": their contents, one after the other, are the text."""


class PromptsAsked(_Asked):
    """Prompts and the checkpoints that answer them; greedy unless a temperature is given."""

    steps: list[int] = Field(min_length=1, max_length=_MOST_CHECKPOINTS)
    prompts: list[Annotated[str, StringConstraints(min_length=1, max_length=_MOST_CHARACTERS)]] = Field(
        min_length=1, max_length=_MOST_PROMPTS
    )
    temperature: float = Field(default=0.0, ge=0, le=10, allow_inf_nan=False)


@router.get("/runs/{run_id}/checkpoints")
def checkpoints(request: Request, run_id: str) -> dict[str, Any]:  # Any: JSON
    """Return the steps of a run's checkpoints, and why none may be opened (empty: they may)."""
    console, run = console_of(request), run_of(request, run_id)
    steps = steps_of(run.folder)
    open_one = console.models.key
    return {
        "steps": steps,
        "why_not": console.rules.why_no_models or ("" if steps else "The run has no checkpoint yet."),
        "open": None if open_one is None else str(open_one),
    }


@router.post("/runs/{run_id}/chat", response_model=None)
async def chat(request: Request, run_id: str, asked: ChatAsked) -> Response:
    """Stream the answer of a checkpoint to a conversation."""
    console, run = console_of(request), await run_in_threadpool(run_of, request, run_id)
    return _stream(console, _answered(console, run, asked))


@router.post("/runs/{run_id}/answers", response_model=None)
async def answers(request: Request, run_id: str, asked: PromptsAsked) -> Response:
    """Stream the answers of several checkpoints to the same prompts, one checkpoint after the other."""
    console, run = console_of(request), await run_in_threadpool(run_of, request, run_id)
    return _stream(console, _compared(console, run, asked))


Event = tuple[str, Any]  # Any: JSON


def _stream(console: ConsoleState, events: AsyncIterator[Event]) -> Response:
    if why := console.rules.why_no_models:
        return refusal(403, why)
    return StreamingResponse(_written(events), media_type="text/event-stream")


async def _written(events: AsyncIterator[Event]) -> AsyncIterator[str]:
    yield ": opening\n\n"
    try:
        async for kind, data in events:
            yield f"event: {kind}\ndata: {json.dumps(data)}\n\n"
    except (PenstockError, OSError, RuntimeError, MemoryError) as error:  # torch's word for no memory is one
        yield f"event: error\ndata: {json.dumps({'said': str(error) or 'no memory is left'})}\n\n"
    yield "event: end\ndata: {}\n\n"


async def _answered(console: ConsoleState, run: FoundRun, asked: ChatAsked) -> AsyncIterator[Event]:
    messages: list[Message] = [{"role": one.role, "content": one.content} for one in asked.messages]
    async with _model(console, run, asked.step) as llm:
        request = await asyncio.to_thread(_request, llm, messages, asked)
        async with aclosing(llm.stream_async(request)) as deltas:
            async for delta in deltas:
                if console.is_ending:
                    return
                yield "text", {"text": delta.text, "finish": delta.finish}


async def _compared(console: ConsoleState, run: FoundRun, asked: PromptsAsked) -> AsyncIterator[Event]:
    for step in dict.fromkeys(asked.steps):
        try:
            async with _model(console, run, step) as llm:
                tasks = [_whole(console, llm, prompt, asked) for prompt in asked.prompts]
                found = await asyncio.gather(*tasks, return_exceptions=True)  # none goes on without its model
                for one in found:
                    if isinstance(one, BaseException):
                        raise one
        except (PenstockError, OSError, RuntimeError, MemoryError) as error:
            yield "answers", {"step": step, "error": str(error) or "no memory is left"}
            continue
        yield "answers", {"step": step, "answers": found}


async def _whole(console: ConsoleState, llm: "LLM", prompt: str, asked: PromptsAsked) -> dict[str, Any]:
    text, finish = "", None
    request = await asyncio.to_thread(_request, llm, [{"role": "user", "content": prompt}], asked)
    async with aclosing(llm.stream_async(request)) as deltas:
        async for delta in deltas:
            text, finish = text + delta.text, delta.finish
            if console.is_ending:
                break
    return {"prompt": prompt, "answer": text, "cut": finish == "length"}


def _request(llm: "LLM", messages: list[Message], asked: _Asked) -> "EngineRequest":
    sampling = Sampling(temperature=asked.temperature)
    params = Params(sampling=sampling, max_tokens=None)  # as many as fit
    if asked.mode == "chat":
        request = llm.chat_request(messages, params)
    else:
        request = llm.request("".join(message["content"] for message in messages), params)
    return replace(request, max_tokens=min(request.max_tokens, asked.max_tokens))


@asynccontextmanager
async def _model(console: ConsoleState, run: FoundRun, step: int) -> AsyncIterator["LLM"]:
    """Context manager: the engine of a checkpoint; opening it keeps a thread busy, not the event loop.

    Who goes away meanwhile leaves an engine that closes after its time without use.
    """
    key = ModelKey("answers", run.id, step, run.name)
    lent: AbstractContextManager[LLM] = console.models.lent(
        key, lambda: open_answering(run.folder, step), is_shared=True
    )
    opening = asyncio.ensure_future(asyncio.to_thread(lent.__enter__))
    try:
        llm = await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(lambda done: done.exception() or lent.__exit__(None, None, None))
        raise
    try:
        yield llm
    finally:
        lent.__exit__(None, None, None)
