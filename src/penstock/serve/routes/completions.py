"""POST /v1/completions."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.core import clock
from penstock.engine import request as engine
from penstock.serve.chat.prompt import prompts_of
from penstock.serve.chat.response_format import grammar_of, not_enforced, wanted_form
from penstock.serve.chat.tools import ToolUse
from penstock.serve.chat.unusable import located
from penstock.serve.engine_request import RouteOptions, check_logprobs, engine_request
from penstock.serve.errors import ApiError
from penstock.serve.limits import ServerLimits
from penstock.serve.output_stream import UsageCounter, stop_reason
from penstock.serve.routes.dependencies import STREAMED, new_id, reply, service_of, telling, visit_of
from penstock.serve.schema.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from penstock.serve.sse import EventStream
from penstock.serve.state import AppState
from penstock.serve.token_strings import Offsets, TokenNames

router = APIRouter()


@router.post("/v1/completions", response_model=Completion, responses=STREAMED)
async def complete(body: CompletionRequest, request: Request) -> Response:
    """Complete one or several prompts; answer i of prompt p is choice p * n + i."""
    service, visit = service_of(request), visit_of(request)
    service.check_open()
    _check(body)
    served = service.served.of(body.model)
    requests = await asyncio.to_thread(_requests, body, service, client=visit.client)
    tally = UsageCounter(visit.opened(service.bridge.submit(requests)))
    writers = [
        ChoiceWriter(body, one.prompt, index=position * one.num_answers + answer, names=served.names)
        for position, one in enumerate(requests)
        for answer in range(one.num_answers)
    ]
    frame = Completion(
        id=new_id("cmpl"),
        created=int(clock.unix_seconds()),
        model=served.name,
        choices=[],
    )
    missed = not_enforced(ToolUse(), wanted_form(body))
    if body.wants_stream:
        return telling(missed, EventStream(_chunks(frame, tally, writers, body)))
    deltas: list[list[CompletionChoice]] = [[] for _ in writers]
    async for index, delta in tally:
        deltas[index].append(writers[index].take(delta))
    choices = [_joined(of_one) for of_one in deltas]
    return telling(missed, reply(frame.model_copy(update={"choices": choices, "usage": tally.usage()})))


class ChoiceWriter:
    """Converts engine deltas of one answer to choices.

    Args:
        prompt: token ids, for `echo`.
    """

    def __init__(
        self, body: CompletionRequest, prompt: Sequence[int], *, index: int, names: TokenNames
    ) -> None:
        self._index = index
        self._names = names
        self._wants_logprobs = body.logprobs is not None
        self._only_prompt = body.max_tokens == 0
        self._echo = tuple(prompt) if body.echo else ()
        self._prompt = list(prompt) if body.return_token_ids else None
        self._wants_ids = bool(body.return_token_ids)
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._stop_ids = frozenset(body.stop_token_ids or ())
        self._offsets = Offsets()

    def take(self, delta: engine.OutputDelta) -> CompletionChoice:
        """Return the choice of one delta."""
        drawn = () if self._only_prompt else delta.token_ids
        text = "" if self._only_prompt else delta.text
        logprobs: tuple[engine.TokenLogprob | None, ...] = delta.logprobs[: len(drawn)]
        token_ids, echo, self._echo = drawn, self._echo, ()
        if echo:
            text = self._names.text(echo) + text
            token_ids, logprobs = echo + drawn, (delta.prompt_logprobs or ()) + logprobs
        prompt, self._prompt = self._prompt, None
        told = delta.prompt_logprobs if self._wants_prompt_logprobs else None
        return CompletionChoice(
            index=self._index,
            text=text,
            logprobs=self._logprobs(token_ids, logprobs) if self._wants_logprobs else None,
            finish_reason="stop" if delta.finish == "stop" else "length" if delta.finish else None,
            stop_reason=stop_reason(delta, self._stop_ids),
            prompt_logprobs=None if told is None else self._names.for_prompt(told),
            prompt_token_ids=prompt,
            token_ids=list(drawn) if self._wants_ids else None,
        )

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[engine.TokenLogprob | None]
    ) -> CompletionLogprobs:
        return self._names.for_completion(token_ids, logprobs, offsets=self._offsets, as_ids=self._as_ids)


def _check(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(f"best_of must equal n (got {body.best_of}). Leave it out.", param="best_of")
    if body.max_tokens == 0 and (not body.echo or body.wants_stream):
        raise ApiError(
            "max_tokens is 0: only with echo, and not streamed. Ask for a token.", param="max_tokens"
        )


def _max_tokens(body: CompletionRequest, limits: ServerLimits) -> int:
    if body.max_tokens is None:
        return min(16, limits.max_output_tokens or 16)  # the API's default
    return body.max_tokens or 1


def _requests(body: CompletionRequest, service: AppState, *, client: str) -> list[engine.Request]:
    served, limits, wanted = service.served.of(body.model), service.limits, wanted_form(body)
    prompts = prompts_of(
        body.prompt,
        served,
        max_prompts=limits.max_prompts,
        param="prompt",
        truncates=body.truncate_prompt_tokens is not None,
        encode=served.text_processor.encode,
    )
    asked = RouteOptions(
        max_tokens=_max_tokens(body, limits),
        num_logprobs=body.logprobs,
        num_prompt_logprobs=body.logprobs if body.echo else None,
        grammar=grammar_of(wanted),
    )
    if body.logprob_token_ids and body.logprobs is None:
        raise ApiError("logprob_token_ids is given without logprobs.", param="logprob_token_ids")
    made = [
        engine_request(
            body, prompt, asked, served=served, limits=limits, client=client, now_s=clock.monotonic()
        )
        for prompt in prompts
    ]
    check_logprobs(made, is_streamed=body.wants_stream)
    try:
        return [service.checked(one, grammar_key=wanted.key) for one in made]
    except ApiError as error:
        raise located(error, wanted, service.refusal(made[0])) from None


async def _chunks(
    frame: Completion, tally: UsageCounter, writers: Sequence[ChoiceWriter], body: CompletionRequest
) -> AsyncIterator[Completion]:
    async for index, delta in tally:
        usage = tally.usage() if body.wants_running_usage else None
        yield frame.model_copy(update={"choices": [writers[index].take(delta)], "usage": usage})
    if body.wants_usage:
        yield frame.model_copy(update={"usage": tally.usage()})


def _joined(deltas: Sequence[CompletionChoice]) -> CompletionChoice:
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    ids = [delta.token_ids for delta in deltas if delta.token_ids is not None]
    return CompletionChoice(
        index=deltas[-1].index,
        text="".join(delta.text for delta in deltas),
        logprobs=CompletionLogprobs(
            tokens=[token for one in logprobs for token in one.tokens],
            token_logprobs=[value for one in logprobs for value in one.token_logprobs],
            top_logprobs=[table for one in logprobs for table in one.top_logprobs],
            text_offset=[offset for one in logprobs for offset in one.text_offset],
        )
        if logprobs
        else None,
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), None),
        prompt_token_ids=deltas[0].prompt_token_ids,
        token_ids=[token for some in ids for token in some] if ids else None,
    )
