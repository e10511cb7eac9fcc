"""Routes of checkpoints as models: which there are, a chat with one, and prompts answered by several.

A chat is OpenAI's API, passed on to the checkpoint's process: the server and the console have one chat page.
The answers of several checkpoints are server-sent events, each with a JSON object: `answers` has those of one
checkpoint, or why there are none, and `end` is the last.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.responses import Response, StreamingResponse

from penstock.console.access import refusal
from penstock.console.state import Console, ConsoleState, Run
from penstock.console.workers.model_process import ModelProcess
from penstock.console.workers.model_slot import MAX_CONTEXT, ModelKey
from penstock.core.errors import PenstockError
from penstock.obs.run_data.discover import FoundRun

router = APIRouter(prefix="/api")

_MAX_MESSAGES = 200
_MAX_CHARACTERS = 200_000
_MAX_PROMPTS = 10
_MAX_CHECKPOINTS = 8

Reply = dict[str, Any]  # Any: JSON values
Text = Annotated[str, StringConstraints(max_length=_MAX_CHARACTERS)]


class ChatMessage(BaseModel):
    """Message of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: Text


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_tokens: int = Field(default=256, ge=1, le=MAX_CONTEXT)
    temperature: float = Field(default=0.8, ge=0, le=2, allow_inf_nan=False)


class _Streamed(_Asked):
    stream: Literal[True] = True
    stream_options: dict[Literal["include_usage"], bool] = Field(default_factory=dict)


class ChatAsked(_Streamed):
    """Conversation, as in OpenAI's API; the run's chat template is applied."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=_MAX_MESSAGES)


class TextAsked(_Streamed):
    """Text to continue, as in OpenAI's API."""

    prompt: Text


class PromptsAsked(_Asked):
    """Prompts and the checkpoints that answer them; greedy unless a temperature is given."""

    mode: Literal["chat", "text"] = "chat"
    """chat: the run's chat template is applied; text: the prompt is continued as it is."""
    steps: list[int] = Field(min_length=1, max_length=_MAX_CHECKPOINTS)
    prompts: list[Annotated[str, StringConstraints(min_length=1, max_length=_MAX_CHARACTERS)]] = Field(
        min_length=1, max_length=_MAX_PROMPTS
    )
    temperature: float = Field(default=0.0, ge=0, le=2, allow_inf_nan=False)


@router.get("/runs/{run_id}/checkpoints")
def checkpoints(console: Console, run: Run) -> dict[str, Any]:  # Any: JSON
    """Return the steps of a run's checkpoints, and why none may be opened (empty: they may)."""
    steps = console.data.ask("checkpoints", run.folder)["steps"]
    open_one = console.models.key
    return {
        "steps": steps,
        "why_not": console.rules.why_no_models or ("" if steps else "The run has no checkpoint yet."),
        "open": None if open_one is None else f"has {open_one} in memory",
    }


@router.post("/runs/{run_id}/checkpoints/{step}/chat/completions", response_model=None)
async def chat(console: Console, run: Run, step: int, asked: ChatAsked) -> Response:
    """Stream the answer of a checkpoint to a conversation, as the server of the API does."""
    messages = [one.model_dump() for one in asked.messages]
    return _passed_on(console, run, step, {"messages": messages}, asked)


@router.post("/runs/{run_id}/checkpoints/{step}/completions", response_model=None)
async def complete(console: Console, run: Run, step: int, asked: TextAsked) -> Response:
    """Stream how a checkpoint continues a text, as the server of the API does."""
    return _passed_on(console, run, step, {"prompt": asked.prompt}, asked)


@router.post("/runs/{run_id}/answers", response_model=None)
async def answers(console: Console, run: Run, asked: PromptsAsked) -> Response:
    """Stream the answers of several checkpoints to the same prompts, one checkpoint after the other."""
    return _stream(console, _written(_compared(console, run, asked)))


Event = tuple[str, Any]  # Any: JSON


def _stream(console: ConsoleState, pieces: AsyncIterator[str]) -> Response:
    if why := console.rules.why_no_models:
        return refusal(403, why)
    return StreamingResponse(pieces, media_type="text/event-stream")


def _passed_on(console: ConsoleState, run: FoundRun, step: int, prompt: Reply, asked: _Streamed) -> Response:
    async def pieces() -> AsyncIterator[str]:
        yield ": opening\n\n"
        try:
            async with _model(console, run, step) as model, aclosing(_chunks(model, prompt, asked)) as chunks:
                async for chunk in chunks:
                    if console.is_ending:
                        return
                    yield f"data: {json.dumps(chunk)}\n\n"
        except (PenstockError, OSError) as error:
            yield f"data: {json.dumps({'error': {'message': str(error)}})}\n\n"
        yield "data: [DONE]\n\n"

    return _stream(console, pieces())


async def _written(events: AsyncIterator[Event]) -> AsyncIterator[str]:
    yield ": opening\n\n"
    async for kind, data in events:
        yield f"event: {kind}\ndata: {json.dumps(data)}\n\n"
    yield "event: end\ndata: {}\n\n"


async def _compared(console: ConsoleState, run: FoundRun, asked: PromptsAsked) -> AsyncIterator[Event]:
    for step in dict.fromkeys(asked.steps):
        try:
            async with _model(console, run, step) as model:
                tasks = [_whole(console, model, prompt, asked) for prompt in asked.prompts]
                found = await asyncio.gather(*tasks, return_exceptions=True)  # none goes on without its model
                for one in found:
                    if isinstance(one, BaseException):
                        raise one
        except (PenstockError, OSError) as error:
            yield "answers", {"step": step, "error": str(error)}
            continue
        yield "answers", {"step": step, "answers": found}


async def _whole(console: ConsoleState, model: ModelProcess, prompt: str, asked: PromptsAsked) -> Reply:
    chats, answer, finish = asked.mode == "chat", "", None
    wanted: Reply = {"messages": [{"role": "user", "content": prompt}]} if chats else {"prompt": prompt}
    async with aclosing(_chunks(model, wanted, asked)) as chunks:
        async for chunk in chunks:
            if console.is_ending:
                break
            for choice in chunk["choices"]:
                answer += (choice["delta"].get("content") or "") if chats else choice["text"]
                finish = choice["finish_reason"]
    return {"prompt": prompt, "answer": answer, "cut": finish == "length"}


async def _chunks(model: ModelProcess, prompt: Reply, asked: _Asked) -> AsyncGenerator[Reply, None]:
    """Yield the chunks of an answer; of as many tokens as fit, if more are asked for."""
    tokens = await asyncio.to_thread(model.post, "/tokenize", prompt)
    room = max(1, tokens["max_model_len"] - tokens["count"])
    body = {**prompt, "max_tokens": min(asked.max_tokens, room), "temperature": asked.temperature}
    path = "/v1/chat/completions" if "messages" in prompt else "/v1/completions"
    async with aclosing(model.stream(path, {**body, "stream_options": {"include_usage": True}})) as chunks:
        async for chunk in chunks:
            yield chunk


@asynccontextmanager
async def _model(console: ConsoleState, run: FoundRun, step: int) -> AsyncIterator[ModelProcess]:
    """Context manager: a checkpoint's process; opening it keeps a thread busy, not the event loop.

    Who goes away meanwhile leaves a process that ends after its time without use.
    """
    folder = await asyncio.to_thread(lambda: run.folder)
    lent = console.models.lent(ModelKey(folder, step, run.name))
    opening = asyncio.ensure_future(asyncio.to_thread(lent.__enter__))
    try:
        model = await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(lambda done: done.exception() or lent.__exit__(None, None, None))
        raise
    try:
        yield model
    finally:
        lent.__exit__(None, None, None)
