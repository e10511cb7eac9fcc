"""Requests of the serving benchmark: prompts and lengths drawn from a seed, the same for every engine."""

import numpy as np

SHAPES = {
    "tiny": "64/128/2/4/2/512",
    "125m": "768/2048/12/12/12/32000",
    "1b": "2048/8192/16/32/8/128256",
}
"""hidden / intermediate / layers / heads / key-value heads / vocabulary; the last is that of Llama 3.2 1B."""


def request(arrival_s, prompt, max_tokens):
    """One request as JSON: when it comes, its ids, and how many tokens follow exactly."""
    return {"arrival_s": float(arrival_s), "prompt": [int(i) for i in prompt], "max_tokens": int(max_tokens)}


def one(length, max_tokens, *, vocabulary, seed):
    """One request with a prompt of its own."""
    rng = np.random.default_rng(seed)
    return [request(0, rng.integers(3, vocabulary, length), max_tokens)]


def many(count, *, vocabulary, seed, scale=1.0, per_s=None):
    """So many requests, with log-normal lengths of prompts (median 96) and answers (median 48).

    Args:
        scale: factor on the lengths.
        per_s: mean rate of Poisson arrivals; None: all come at once.
    """
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(np.log(96), 0.6, count), 16, 512) * scale
    answers = np.clip(rng.lognormal(np.log(48), 0.5, count), 8, 192) * scale
    gaps = np.zeros(count) if per_s is None else rng.exponential(1 / per_s, count)
    return [
        request(at, rng.integers(3, vocabulary, max(1, int(p))), max(2, int(a)))
        for at, p, a in zip(gaps.cumsum(), prompts, answers, strict=True)
    ]


def cases(arguments):
    """Return name -> requests of one round."""
    vocabulary = int(SHAPES[arguments.model].split("/")[-1])
    scale = arguments.scale
    known = {
        "single": one(32, max(2, int(128 * scale)), vocabulary=vocabulary, seed=1),
        "prefill": one(max(16, int(1024 * scale)), 1, vocabulary=vocabulary, seed=2),
    }
    for count in arguments.concurrent:
        known[f"{count} at once"] = many(count, vocabulary=vocabulary, seed=count, scale=scale)
    return known
