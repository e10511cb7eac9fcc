"""Engine requests from the JSON of HTTP requests; pure."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.core.errors import UsageError
from penstock.core.units import plural
from penstock.engine.prompts import check_prompt, room_after
from penstock.engine.request import Request
from penstock.engine.sampling_params import Sampling
from penstock.serve.errors import ApiError, api_error_of, named_key, too_long
from penstock.serve.limits import ServerLimits
from penstock.serve.schema.base import Generation, Truncation
from penstock.serve.state import ModelInfo
from penstock.text.tokenizer import Tokenizer

MAX_LOGPROBS_OF_REQUEST = 2**22
MAX_PROMPT_LOGPROBS_OF_REQUEST = 2**18  # serialised at once on the event loop
"""Limits over all prompts and answers of a request: log-probabilities are kept in memory until they are sent.
One answer of 128k tokens with 20 alternatives each is below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOptions:
    """Values that each route derives in its own way."""

    max_tokens: int | None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    grammar: str | None = None
    stop_texts: tuple[str, ...] = ()
    """Stop texts besides those of the request, for models without a chat template."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that mark calls and reasoning in the text."""
    prompt_key: str = "prompt"
    """Key of the prompt, for error messages."""


def engine_request(
    body: Generation,
    prompt: Sequence[int],
    asked: RouteOptions,
    *,
    served: ModelInfo,
    limits: ServerLimits,
    client: str,
    now_s: float,
) -> Request:
    """Return the engine request of a body.

    Args:
        served: the model, or what the body names.

    Raises:
        ApiError: a value is out of its limits, or prompt and answer do not fit the context.
    """
    _check(body)
    served = served.of(body.model)
    room = max(1, served.context - (asked.max_tokens or 1))
    prompt = truncated(prompt, body, room=room, side="left")
    num_answers = body.n or 1
    if num_answers > limits.max_answers:
        raise ApiError(f"n is at most {limits.max_answers} (got {num_answers}).", param="n")
    num_prompt_logprobs = asked.num_prompt_logprobs if body.prompt_logprobs is None else body.prompt_logprobs
    return Request(
        prompt=tuple(prompt),
        max_tokens=_max_tokens(prompt, asked, served=served, limits=limits),
        sampling=_sampling(body, asked.num_logprobs, served),
        stop_ids=_stop_ids(body, served),
        stop_texts=_stop_texts(body.stop, limits) + asked.stop_texts,
        shown_ids=asked.shown_ids,
        num_answers=num_answers,
        priority=body.priority or 0,
        client=client,
        adapter=served.adapter,
        salt=body.cache_salt or "",
        grammar=asked.grammar,
        deadline_s=None if limits.deadline_s is None else now_s + limits.deadline_s,
        num_prompt_logprobs=served.vocab_size if body.prompt_logprobs == -1 else num_prompt_logprobs,
    )


def _check(body: Generation) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options is given without stream: true.", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError("prompt_logprobs are not part of a stream. Leave stream out.", param="prompt_logprobs")


def truncated(
    prompt: Sequence[int], body: Truncation, *, room: int, side: Literal["left", "right"], added: int = 0
) -> Sequence[int]:
    """Return the tokens of a prompt that are used.

    Args:
        room: number of tokens that -1 means.
        side: side to truncate if the request names none.
        added: number of tokens that will be added around the prompt; they count.

    Raises:
        ApiError: a prompt of no tokens is asked for, or a side without a length.
    """
    most = body.truncate_prompt_tokens
    if most is None:
        if body.truncation_side is not None:
            raise ApiError(
                "truncation_side is given without truncate_prompt_tokens.", param="truncation_side"
            )
        return prompt
    if most == 0:
        raise ApiError(
            "truncate_prompt_tokens must be -1 or at least 1 (got 0).", param="truncate_prompt_tokens"
        )
    most = (room if most < 0 else most) - added
    if most < 1:
        raise ApiError(
            f"truncate_prompt_tokens leaves no room for the text: the tokenizer adds {added:,} tokens (got "
            f"{body.truncate_prompt_tokens}).",
            param="truncate_prompt_tokens",
        )
    return prompt[:most] if (body.truncation_side or side) == "right" else prompt[-most:]


def check_logprobs(requests: Sequence[Request], *, is_streamed: bool) -> None:
    """Refuse requests whose log-probabilities would need too much memory.

    Args:
        is_streamed: True: those of answers are sent at once; those of prompts never are.

    Raises:
        ApiError: there may be more than `MAX_LOGPROBS_OF_REQUEST` or `MAX_PROMPT_LOGPROBS_OF_REQUEST`.
    """
    total = of_prompts = 0
    for one in requests:
        sampling = one.sampling
        if one.num_prompt_logprobs is not None:
            of_prompts += one.num_answers * len(one.prompt) * (1 + one.num_prompt_logprobs)
        if sampling.num_logprobs is not None and not is_streamed:
            beside = len(sampling.logprob_token_ids) or sampling.num_logprobs
            total += one.num_answers * one.max_tokens * (1 + beside)
    if of_prompts > MAX_PROMPT_LOGPROBS_OF_REQUEST:
        raise ApiError(
            f"There may be {of_prompts:,} log-probabilities of prompts, and the limit is "
            f"{MAX_PROMPT_LOGPROBS_OF_REQUEST:,}. Ask for shorter prompts, fewer answers or tokens.",
            param="prompt_logprobs",
        )
    if total > MAX_LOGPROBS_OF_REQUEST:
        raise ApiError(
            f"There may be {total:,} log-probabilities, and the limit is {MAX_LOGPROBS_OF_REQUEST:,}. "
            "Ask for fewer tokens, answers or likeliest tokens.",
            param="logprobs",
        )


def check_embedded(prompt: Sequence[int], served: ModelInfo, *, param: str) -> None:
    """Refuse a prompt that cannot be embedded.

    Raises:
        ApiError: it is empty, has unknown token ids, or is longer than the context or the folder's
            max_seq_length.
    """
    rules = served.text_processor.embedding
    most = min(served.context, rules.max_tokens or served.context)
    if len(prompt) > most:
        fix = "Shorten it, or give truncate_prompt_tokens."
        raise too_long(most, f"it has {len(prompt):,}. {fix}", param=param)
    try:
        check_prompt(prompt, context=served.context, vocab_size=served.vocab_size)
    except UsageError as error:
        raise api_error_of(error, param=param) from None


def _room(prompt: Sequence[int], served: ModelInfo, *, key: str) -> int:
    context = served.context
    if len(prompt) >= context:
        raise too_long(context, f"it has {len(prompt):,}, and an answer needs one. Shorten it.", param=key)
    try:
        return room_after(prompt, context=context, vocab_size=served.vocab_size, max_tokens=None)
    except UsageError as error:
        raise api_error_of(error, param=key) from None


def _max_tokens(
    prompt: Sequence[int], asked: RouteOptions, *, served: ModelInfo, limits: ServerLimits
) -> int:
    wanted, room = asked.max_tokens, _room(prompt, served, key=asked.prompt_key)
    most = min(room, limits.max_output_tokens or room)
    if wanted is None:
        return most
    if wanted > room:
        raise too_long(
            served.context,
            f"it has {plural(len(prompt), 'token')}, and {wanted:,} more are requested. Request at most "
            f"{room:,}, or shorten the prompt.",
            answer=True,
            param="max_tokens",
        )
    if wanted > most:
        raise ApiError(f"max_tokens is at most {most:,} here (got {wanted:,}).", param="max_tokens")
    return wanted


def _sampling(body: Generation, num_logprobs: int | None, served: ModelInfo) -> Sampling:
    own = served.sampling
    top_k = own.top_k if body.top_k is None else body.top_k if body.top_k > 0 else None
    try:
        return Sampling(
            allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
            bad_words_ids=_bad_words(body.bad_words or (), served.text_processor.tokenizer),
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
            logprob_token_ids=tuple(body.logprob_token_ids or ()),
        )
    except UsageError as error:
        raise api_error_of(error, param=named_key(error, type(body).model_fields)) from None


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
            raise ApiError(
                f"logit_bias has {key[:40]!r}, which is not a token id below {vocab_size:,}.",
                param="logit_bias",
            )
    return {int(key): value for key, value in given.items()}


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, with and without a space before it."""
    texts = [text for word in words for text in (word, f" {word.lstrip()}")]
    return tuple(ids for ids in dict.fromkeys(tuple(tokenizer.encode(text)) for text in texts) if ids)


def _stop_ids(body: Generation, served: ModelInfo) -> frozenset[int]:
    own = frozenset() if body.ignore_eos else served.text_processor.stop_ids
    return own | frozenset(body.stop_token_ids or ())


def _stop_texts(given: str | list[str] | None, limits: ServerLimits) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > limits.max_stops:
        raise ApiError(f"stop has {len(stops)} texts, and the limit is {limits.max_stops}.", param="stop")
    for stop in stops:
        if not 1 <= len(stop) <= limits.max_stop_characters:
            raise ApiError(
                f"A stop text must have 1 to {limits.max_stop_characters} characters (got {len(stop)}).",
                param="stop",
            )
    return stops
