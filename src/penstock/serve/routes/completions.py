"""POST /v1/completions."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.core import clock
from penstock.engine import request as engine
from penstock.serve.errors import ApiError
from penstock.serve.form_choice import wanted_form
from penstock.serve.limits import Limits
from penstock.serve.prompts import prompts_of
from penstock.serve.requests import Asked, engine_request
from penstock.serve.routes.asking import STREAMED, new_id, reply, service_of, visit_of
from penstock.serve.schema.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from penstock.serve.served import Service
from penstock.serve.stream import EventStream
from penstock.serve.structure import grammar_of
from penstock.serve.tally import Tally
from penstock.serve.token_names import Offsets, TokenNames

router = APIRouter()


@router.post("/v1/completions", response_model=Completion, responses=STREAMED)
async def complete(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several; answer i of prompt p is choice p * n + i."""
    service, visit = service_of(request), visit_of(request)
    service.check_open()
    _check(body)
    requests = await asyncio.to_thread(_requests, body, service, client=visit.client)
    tally = Tally(visit.opened(service.bridge.submit(requests)))
    writers = [
        ChoiceWriter(body, one.prompt, index=position * one.num_answers + answer, names=service.names)
        for position, one in enumerate(requests)
        for answer in range(one.num_answers)
    ]
    frame = Completion(
        id=new_id("cmpl"),
        created=int(clock.unix_seconds()),
        model=body.model or service.served.name,
        choices=[],
    )
    if body.wants_stream:
        return EventStream(_chunks(frame, tally, writers, body))
    pieces: list[list[CompletionChoice]] = [[] for _ in writers]
    async for index, piece in tally:
        pieces[index].append(writers[index].take(piece))
    choices = [_joined(of_one) for of_one in pieces]
    return reply(frame.model_copy(update={"choices": choices, "usage": tally.usage()}))


class ChoiceWriter:
    """Turns the pieces of one answer into pieces of its choice.

    Args:
        prompt: echoed where that is asked for.
    """

    def __init__(
        self, body: CompletionRequest, prompt: Sequence[int], *, index: int, names: TokenNames
    ) -> None:
        self._index = index
        self._names = names
        self._wants_logprobs = body.logprobs is not None
        self._only_prompt = body.max_tokens == 0
        self._echo = tuple(prompt) if body.echo else ()
        self._offsets = Offsets()

    def take(self, piece: engine.Piece) -> CompletionChoice:
        """Return what a piece adds to the choice."""
        drawn = () if self._only_prompt else piece.token_ids
        text = "" if self._only_prompt else piece.text
        logprobs: tuple[engine.TokenLogprob | None, ...] = piece.logprobs[: len(drawn)]
        token_ids, echo, self._echo = drawn, self._echo, ()
        if echo:
            text = self._names.text(echo) + text
            token_ids, logprobs = echo + drawn, (piece.prompt_logprobs or ()) + logprobs
        return CompletionChoice(
            index=self._index,
            text=text,
            logprobs=self._logprobs(token_ids, logprobs) if self._wants_logprobs else None,
            finish_reason="stop" if piece.finish == "stop" else "length" if piece.finish else None,
        )

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[engine.TokenLogprob | None]
    ) -> CompletionLogprobs:
        return self._names.for_completion(token_ids, logprobs, offsets=self._offsets)


def _check(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, f"best_of must equal n (got {body.best_of}). Leave it out.", param="best_of")
    if body.max_tokens == 0 and (not body.echo or body.wants_stream):
        raise ApiError(
            400, "max_tokens is 0: only with echo, and not streamed. Ask for a token.", param="max_tokens"
        )


def _max_tokens(body: CompletionRequest, limits: Limits) -> int:
    if body.max_tokens is None:
        return min(16, limits.max_output_tokens or 16)  # the API's default
    return body.max_tokens or 1


def _requests(body: CompletionRequest, service: Service, *, client: str) -> list[engine.Request]:
    served, limits = service.served, service.limits
    prompts = prompts_of(body.prompt, served, max_prompts=limits.max_prompts, param="prompt")
    asked = Asked(
        max_tokens=_max_tokens(body, limits),
        num_logprobs=body.logprobs,
        num_prompt_logprobs=body.logprobs if body.echo else None,
        grammar=grammar_of(wanted_form(body)),
    )
    made = [
        engine_request(
            body, prompt, asked, served=served, limits=limits, client=client, now_s=clock.monotonic()
        )
        for prompt in prompts
    ]
    return [service.checked(one) for one in made]


async def _chunks(
    frame: Completion, tally: Tally, writers: Sequence[ChoiceWriter], body: CompletionRequest
) -> AsyncIterator[Completion]:
    async for index, piece in tally:
        usage = tally.usage() if body.wants_running_usage else None
        yield frame.model_copy(update={"choices": [writers[index].take(piece)], "usage": usage})
    if body.wants_usage:
        yield frame.model_copy(update={"usage": tally.usage()})


def _joined(pieces: Sequence[CompletionChoice]) -> CompletionChoice:
    logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    return CompletionChoice(
        index=pieces[-1].index,
        text="".join(piece.text for piece in pieces),
        logprobs=CompletionLogprobs(
            tokens=[token for one in logprobs for token in one.tokens],
            token_logprobs=[value for one in logprobs for value in one.token_logprobs],
            top_logprobs=[table for one in logprobs for table in one.top_logprobs],
            text_offset=[offset for one in logprobs for offset in one.text_offset],
        )
        if logprobs
        else None,
        finish_reason=pieces[-1].finish_reason,
    )
