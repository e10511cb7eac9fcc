"""Prompts: accepted forms, and checks against the model's context; no torch."""

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import SupportsIndex, cast

from penstock.core.errors import UsageError

Prompt = str | Sequence[int]
"""A text, or its token ids."""


def prompts_of(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts from one prompt or several: a text, token ids, or a list of either.

    A list of numbers is one prompt, as in vLLM.

    >>> prompts_of("a"), prompts_of([5, 6]), prompts_of(["a", [5, 6]])
    (['a'], [[5, 6]], ['a', [5, 6]])
    """
    if isinstance(given, str) or not _is_list(given):  # anything else fails later, as one prompt
        return [cast(Prompt, given)]
    many = list(given)
    return [cast(Prompt, many)] if many and all(map(_is_whole_number, many)) else cast(list[Prompt], many)


def _is_list(given: object) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, bytes | Mapping)


def _is_whole_number(one: object) -> bool:
    """True for whole numbers of Python, numpy and torch."""
    try:
        index(one)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return not hasattr(one, "shape") or one.shape == ()


def token_ids(prompt: object) -> list[int]:
    """Return the ids of a prompt that is not a text.

    Raises:
        UsageError: not a list of whole numbers.
    """
    if not _is_list(prompt):
        fix = "Give one of them, or a list of several."
        raise UsageError("A prompt must be a text or token ids", got=prompt, fix=fix)
    return [_token_id(one) for one in cast(Iterable[object], prompt)]


def _token_id(one: object) -> int:
    try:
        return index(cast(SupportsIndex, one))
    except TypeError:
        fix = "Several prompts are a list of texts, or of lists of ids."
        raise UsageError("A prompt has an entry that is not a token id", got=one, fix=fix) from None


def check_prompt(prompt: Sequence[int], *, context: int, vocab_size: int) -> None:
    """Raise for a prompt that the model cannot process.

    Raises:
        UsageError: it is empty, has ids outside the vocabulary, or is longer than the context.
    """
    if not prompt:
        raise UsageError("The prompt is empty", fix="Give at least one token of text.")
    check_token_ids(prompt, vocab_size=vocab_size)
    if len(prompt) > context:
        raise UsageError(
            f"The prompt is longer than the model's context of {context:,} tokens",
            got=len(prompt),
            fix="Shorten it.",
        )


def check_token_ids(tokens: Sequence[int], *, vocab_size: int) -> None:
    """Raise for tokens of a prompt that the model does not have.

    Raises:
        UsageError: an id is negative, or `vocab_size` or more.
    """
    least, most = min(tokens, default=0), max(tokens, default=0)
    if most >= vocab_size or least < 0:
        raise UsageError(
            f"The prompt has a token id outside the model's vocabulary of {vocab_size:,}",
            got=least if least < 0 else most,
            fix="Use the tokenizer the model was trained with.",
        )


def room_after(prompt: Sequence[int], *, context: int, vocab_size: int, max_tokens: int | None) -> int:
    """Return how many tokens may be generated after a prompt: `max_tokens`, or the rest of the context.

    Raises:
        UsageError: prompt and answer do not fit into the context.

    >>> room_after([5, 6], context=8, vocab_size=10, max_tokens=None)
    6
    """
    room = context - len(prompt)
    if room < 1:
        raise UsageError(
            f"The prompt fills the model's context of {context:,} tokens",
            got=len(prompt),
            fix=f"Shorten it to at most {context - 1:,} tokens.",
        )
    check_prompt(prompt, context=context, vocab_size=vocab_size)
    if max_tokens is None:
        return room
    if not 1 <= max_tokens <= room:
        raise UsageError(
            f"max_tokens must be from 1 to {room:,}, which the prompt leaves of the model's context",
            got=max_tokens,
            fix="Ask for fewer tokens or shorten the prompt.",
        )
    return max_tokens
