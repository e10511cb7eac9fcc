"""Choose the next token: a pure function of (logits, settings, position).

The random number of a position is a hash of (seed, position), never the next draw of a generator,
so an answer can be repeated from any token, whatever else the process has sampled. Filters come in
the order of transformers: temperature, then top-k (ties at the k-th value stay), then top-p (the
fewest likeliest tokens whose probabilities reach p; Holtzman et al., arXiv:1904.09751).
"""

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from penstock.core.errors import ModelError
from penstock.core.rng import key_of, mix64
from penstock.engine.sampling import Sampling


def sample(logits: Float[Tensor, "vocab"], sampling: Sampling, *, position: int) -> int:
    """Return the id of the token at `position` (counted from the prompt's start).

    Raises:
        ModelError: the logits are not numbers, as weights that diverged in training make them.
    """
    if not torch.isfinite(logits.max()):  # max is NaN where any logit is
        raise ModelError("The model's logits are not finite", fix="Use an earlier checkpoint of the run.")
    if sampling.temperature == 0:
        return int(logits.argmax())
    cumulative = probabilities(logits, sampling).cumsum(0)
    drawn = uniform(sampling.seed, position) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, drawn, right=True))
    # a product that rounds up to the total would fall behind the last token that can be drawn
    return index if index < len(logits) else int(torch.searchsorted(cumulative, cumulative[-1]))


def probabilities(logits: Float[Tensor, "vocab"], sampling: Sampling) -> Float64[Tensor, "vocab"]:
    """Return the probability of each token after the filters; `temperature` must not be 0."""
    scores = logits.double() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        ordered, order = scores.sort()
        below = ordered.softmax(0).cumsum(0) <= 1 - sampling.top_p
        below[-1] = False  # the likeliest stays, however small p is
        scores = scores.masked_fill(torch.zeros_like(below).scatter(0, order, below), -torch.inf)
    return scores.softmax(0)


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1), a multiple of 2**-53.

    >>> uniform(0, 1) == uniform(0, 1), uniform(0, 1) == uniform(1, 1)
    (True, False)
    """
    counter = np.array([position], dtype=np.uint64) ^ np.uint64(key_of(seed, "sample"))
    return int(mix64(counter)[0] >> np.uint64(11)) / 2**53
