"""Continue a prompt token by token, with a cache."""

from collections.abc import Collection, Iterator, Sequence

import torch

from penstock.core.errors import ModelError, UsageError
from penstock.core.rng import key_of
from penstock.engine.filters import choose
from penstock.engine.kv_cache import KVCache
from penstock.engine.sampler import NOT_FINITE, uniforms
from penstock.engine.sampling import GREEDY, Sampling
from penstock.models.llama.model import Llama


def generate(
    model: Llama,
    prompt: Sequence[int],
    *,
    sampling: Sampling = GREEDY,
    max_tokens: int | None = None,
    stop_ids: Collection[int] = (),
) -> Iterator[int]:
    """Yield the ids that follow a prompt, each as soon as it is known.

    Args:
        model: in evaluation mode.
        prompt: ids, at least one.
        max_tokens: ids to yield at most; None: until the context is full.
        stop_ids: after one of these is yielded, nothing follows.

    Raises:
        UsageError: before the first token, if prompt and answer do not fit the model.
    """
    context, vocab_size = model.config.max_position_embeddings, model.config.vocab_size
    room = room_after(prompt, context=context, vocab_size=vocab_size, max_tokens=max_tokens)
    return _tokens(model, list(prompt), sampling=sampling, room=room, stop_ids=frozenset(stop_ids))


def room_after(prompt: Sequence[int], *, context: int, vocab_size: int, max_tokens: int | None) -> int:
    """Return how many tokens may follow a prompt.

    >>> room_after([5, 6], context=8, vocab_size=10, max_tokens=None)
    6
    """
    if not prompt:
        raise UsageError("The prompt is empty", fix="Give at least one token of text.")
    if max(prompt) >= vocab_size or min(prompt) < 0:
        raise UsageError(
            f"The prompt has a token the model does not know (it has {vocab_size:,})",
            got=max(prompt),
            fix="Use the tokenizer the model was trained with.",
        )
    room = context - len(prompt)
    if room < 1:
        raise UsageError(
            f"The prompt fills the model's context of {context:,} tokens",
            got=len(prompt),
            fix=f"Shorten it to at most {context - 1:,} tokens.",
        )
    if max_tokens is None:
        return room
    if not 1 <= max_tokens <= room:
        raise UsageError(
            f"max_tokens must be from 1 to {room:,}, which the prompt leaves of the model's context",
            got=max_tokens,
            fix="Ask for fewer tokens or shorten the prompt.",
        )
    return max_tokens


def _tokens(
    model: Llama, prompt: list[int], *, sampling: Sampling, room: int, stop_ids: frozenset[int]
) -> Iterator[int]:
    cache = KVCache(model.config.num_hidden_layers)
    device = next(model.parameters()).device
    pending, position, key = prompt, len(prompt), key_of(sampling.seed, "sample", 0)
    for _ in range(room):
        # entered anew for each token: a mode held across `yield` would leak into the caller's code
        with torch.inference_mode():
            ids = torch.tensor([pending], device=device)
            # only the last position is projected: the logits of a long prompt are larger than its cache
            logits = model(ids, cache=cache, finish=lambda hidden, head: head(hidden[:, -1]))
            if not torch.isfinite(logits.max()):  # max is NaN where any logit is
                raise ModelError(NOT_FINITE, fix="Use an earlier checkpoint of the run.")
            token = int(choose(logits.float(), [sampling], uniforms([key], [position])))
        yield token
        if token in stop_ids:
            return
        pending, position = [token], position + 1
