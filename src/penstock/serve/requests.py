"""From the JSON of a request to what the engine is asked; pure."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.errors import UsageError
from penstock.engine.prompts import check_prompt, room_after
from penstock.engine.request import Request
from penstock.engine.sampling import Sampling
from penstock.serve.errors import ApiError, api_error_of
from penstock.serve.limits import Limits
from penstock.serve.schema.generation import Generation
from penstock.serve.served import Served


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the kinds of requests say each in their own way."""

    max_tokens: int | None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    grammar: str | None = None
    stop_texts: tuple[str, ...] = ()
    """Besides those of the request: a plain transcript's."""
    prompt_key: str = "prompt"
    """Where the request has its prompt."""


def engine_request(
    body: Generation,
    prompt: Sequence[int],
    asked: Asked,
    *,
    served: Served,
    limits: Limits,
    client: str,
    now_s: float,
) -> Request:
    """Return what the engine is asked.

    Raises:
        ApiError: a value is out of its limits, or prompt and answer do not fit the context.
    """
    num_answers = body.n or 1
    if num_answers > limits.max_answers:
        raise ApiError(400, f"n is at most {limits.max_answers} (got {num_answers}).", param="n")
    return Request(
        prompt=tuple(prompt),
        max_tokens=_max_tokens(prompt, asked, served=served, limits=limits),
        sampling=_sampling(body, asked.num_logprobs, served),
        stop_ids=_stop_ids(body, served),
        stop_texts=_stop_texts(body.stop, limits) + asked.stop_texts,
        num_answers=num_answers,
        priority=body.priority or 0,
        client=client,
        adapter=served.adapter_of(body.model),
        salt=body.cache_salt or "",
        grammar=asked.grammar,
        deadline_s=None if limits.deadline_s is None else now_s + limits.deadline_s,
        num_prompt_logprobs=asked.num_prompt_logprobs,
    )


def check_embedded(prompt: Sequence[int], served: Served) -> None:
    """Refuse a prompt after which nothing comes.

    Raises:
        ApiError: it is empty, has unknown tokens, or is longer than the context.
    """
    try:
        check_prompt(prompt, context=served.context, vocab_size=served.vocab_size)
    except UsageError as error:
        raise _refused(error, param="input", is_long=len(prompt) > served.context) from None


def _refused(error: UsageError, *, param: str, is_long: bool) -> ApiError:
    refused = api_error_of(error, param=param)
    refused.code = "context_length_exceeded" if is_long else None
    return refused


def _room(prompt: Sequence[int], served: Served, *, key: str) -> int:
    try:
        return room_after(prompt, context=served.context, vocab_size=served.vocab_size, max_tokens=None)
    except UsageError as error:
        raise _refused(error, param=key, is_long=len(prompt) >= served.context) from None


def _max_tokens(prompt: Sequence[int], asked: Asked, *, served: Served, limits: Limits) -> int:
    wanted, room = asked.max_tokens, _room(prompt, served, key=asked.prompt_key)
    most = min(room, limits.max_output_tokens or room)
    if wanted is None:
        return most
    if wanted > room:
        raise ApiError(
            400,
            f"The prompt has {len(prompt):,} tokens and {wanted:,} are asked for, which together do not fit "
            f"the context of {served.context:,}. Ask for at most {room:,}, or shorten the prompt.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if wanted > most:
        raise ApiError(400, f"max_tokens is at most {most:,} here (got {wanted:,}).", param="max_tokens")
    return wanted


def _sampling(body: Generation, num_logprobs: int | None, served: Served) -> Sampling:
    own = served.sampling
    top_k = own.top_k if body.top_k is None else body.top_k if body.top_k > 0 else None
    try:
        return Sampling(
            logit_bias=_bias(body.logit_bias or {}, served.vocab_size),
            repetition_penalty=_given(body.repetition_penalty, own.repetition_penalty),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            temperature=_given(body.temperature, own.temperature),
            top_k=top_k,
            top_p=_given(body.top_p, own.top_p),
            min_p=_given(body.min_p, own.min_p),
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            min_tokens=body.min_tokens or 0,
            num_logprobs=num_logprobs,
        )
    except UsageError as error:
        raise api_error_of(error) from None


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
            raise ApiError(
                400,
                f"logit_bias has {key[:40]!r}, which is no token id below {vocab_size:,}.",
                param="logit_bias",
            )
    return {int(key): value for key, value in given.items()}


def _stop_ids(body: Generation, served: Served) -> frozenset[int]:
    own = frozenset() if body.ignore_eos else served.words.stop_ids
    return own | frozenset(body.stop_token_ids or ())


def _stop_texts(given: str | list[str] | None, limits: Limits) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > limits.max_stops:
        raise ApiError(
            400, f"stop has {len(stops)} texts, at most {limits.max_stops} are taken.", param="stop"
        )
    for stop in stops:
        if not 1 <= len(stop) <= limits.max_stop_characters:
            raise ApiError(
                400,
                f"A stop text has 1 to {limits.max_stop_characters} characters (got {len(stop)}).",
                param="stop",
            )
    return stops
