"""Draw tokens from logits under temperature, top-k, top-p and min-p, many rows at once.

Filters come in the order of transformers: temperature, top-k (ties at the k-th value stay), top-p (the
fewest likeliest tokens whose probabilities reach p; Holtzman et al., arXiv:1904.09751), min-p (Nguyen et
al., arXiv:2407.01082). `probabilities` says in float64 what they mean.

`choose` does the same without sorting a vocabulary. Each filter keeps a beginning of the tokens in the
order of their likelihood, so ordering the few likeliest decides nearly every row; a row whose kept tokens
do not end among these is ordered further, and at last whole. A row without filters needs no order at all:
the drawn number is looked up in the sums of pieces of the vocabulary, then in one piece. Each row goes
its own way, so a token never depends on the neighbours in its batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor
from torch.nn import functional

from penstock.engine.sampling import Sampling

_LADDER = (64, 1024, 8192)
"""Likeliest tokens ordered at first, and then; a whole vocabulary of 32,000 takes three times the last."""
_PIECE = 256
_COLDEST = 1e-30
"""float32 has no room below to divide by; nothing but the likeliest is ever drawn there anyway."""


def probabilities(logits: Float[Tensor, "vocab"], sampling: Sampling) -> Float64[Tensor, "vocab"]:
    """Return the probability of each token after the filters; at temperature 0 all is on the likeliest."""
    scores = logits.double()
    if sampling.temperature == 0:
        return functional.one_hot(scores.argmax(), len(scores)).double()
    scores = (scores - scores.max()) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        ordered, order = scores.sort()
        below = ordered.softmax(0).cumsum(0) <= 1 - sampling.top_p
        below[-1] = False  # the likeliest stays, however small p is
        scores = scores.masked_fill(torch.zeros_like(below).scatter(0, order, below), -torch.inf)
    found = scores.softmax(0)
    if sampling.min_p > 0:
        found = found.where(found >= sampling.min_p * found.max(), 0)
    return found / found.sum()


def choose(
    scores: Float[Tensor, "rows vocab"], settings: Sequence[Sampling], numbers: np.ndarray
) -> Int64[Tensor, "rows"]:
    """Draw a token for each row.

    Args:
        scores: float32; each row has a finite largest element. -inf: never drawn.
        settings: one per row.
        numbers: [rows] float64 in [0, 1), which decide what is drawn.
    """
    tokens = scores.argmax(-1)
    groups: dict[bool, list[int]] = {}
    for row, sampling in enumerate(settings):
        if sampling.temperature > 0:
            filtered = sampling.top_k is not None or sampling.top_p < 1 or sampling.min_p > 0
            groups.setdefault(filtered, []).append(row)
    for filtered, rows in groups.items():
        chosen = [settings[row] for row in rows]
        where = torch.tensor(rows, device=scores.device)
        heat = _column([max(sampling.temperature, _COLDEST) for sampling in chosen], scores)
        part = scores[where]
        relative = (part - part.amax(-1, keepdim=True)) / heat.float()
        drawn = _column(numbers[rows], scores)
        tokens[where] = _filtered(relative, chosen, drawn) if filtered else _unfiltered(relative, drawn)
    return tokens


def _filtered(
    relative: Float[Tensor, "rows vocab"], settings: Sequence[Sampling], numbers: Float64[Tensor, "rows 1"]
) -> Int64[Tensor, "rows"]:
    num_rows, vocab = relative.shape
    tokens = torch.zeros(num_rows, dtype=torch.int64, device=relative.device)
    totals = relative.exp().sum(-1, keepdim=True, dtype=torch.float64)
    todo = torch.arange(num_rows, device=relative.device)
    for size in (*(size for size in _LADDER if size < vocab), vocab):
        values, ids = relative[todo].topk(size)
        weights = values.double().exp()
        kept, decided = _kept(values, weights, [settings[row] for row in todo.tolist()], totals[todo], vocab)
        cumulative = weights.where(kept, 0).cumsum(-1)
        index = _search(cumulative, numbers[todo] * cumulative[:, -1:])
        tokens[todo[decided]] = ids.gather(1, index[:, None])[:, 0][decided]
        todo = todo[~decided]
        if not len(todo):
            break
    return tokens


def _kept(
    values: Float[Tensor, "rows size"],
    weights: Float64[Tensor, "rows size"],
    settings: Sequence[Sampling],
    totals: Float64[Tensor, "rows 1"],
    vocab: int,
) -> tuple[Bool[Tensor, "rows size"], Bool[Tensor, "rows"]]:
    """Return which of the likeliest tokens stay, and in which rows these are all that stay."""
    size = values.shape[1]
    top_k = torch.tensor([[min(s.top_k or vocab, vocab)] for s in settings], device=values.device)
    # p = 1 keeps all, which the rounding of a sum must not undo
    top_p = _column([s.top_p if s.top_p < 1 else torch.inf for s in settings], values)
    min_p = _column([s.min_p for s in settings], values)
    kept = values >= values.gather(1, top_k.clamp(max=size) - 1)
    # the k likeliest may reach beyond what was ordered: then their sum is not known, unless they are all
    known = ~kept[:, -1] | (top_k[:, 0] == vocab)
    totals = torch.where(top_k == vocab, totals, weights.where(kept, 0).sum(-1, keepdim=True))
    kept &= weights.cumsum(-1) - weights < top_p * totals
    kept &= weights >= min_p
    kept[:, 0] = True  # the likeliest stays, however small p is
    return kept, (known & ~kept[:, -1]) | (size == vocab)


def _unfiltered(
    relative: Float[Tensor, "rows vocab"], numbers: Float64[Tensor, "rows 1"]
) -> Int64[Tensor, "rows"]:
    weights = functional.pad(relative.exp(), (0, -relative.shape[1] % _PIECE))
    pieces = weights.view(len(weights), -1, _PIECE)
    sums = pieces.sum(-1, dtype=torch.float64).cumsum(-1)
    target = numbers * sums[:, -1:]
    piece = _search(sums, target)[:, None]
    before = functional.pad(sums, (1, 0)).gather(1, piece)
    within = pieces[torch.arange(len(pieces), device=pieces.device), piece[:, 0]].double().cumsum(-1)
    return piece[:, 0] * _PIECE + _search(within, target - before)


def _search(
    cumulative: Float64[Tensor, "rows n"], target: Float64[Tensor, "rows 1"]
) -> Int64[Tensor, "rows"]:
    """Return where each target falls; a product that rounds up to the total falls on the last weight."""
    found = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(found, last)[:, 0]


def _column(values: Sequence[float] | np.ndarray, like: Tensor) -> Float64[Tensor, "rows 1"]:
    return torch.as_tensor(values, dtype=torch.float64, device=like.device)[:, None]
