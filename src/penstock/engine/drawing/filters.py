"""Draw tokens from logits under temperature, top-k, top-p and min-p: what is drawn, exactly.

Filters come in the order of transformers: temperature, top-k (ties at the k-th value stay), top-p (the
fewest likeliest tokens whose probabilities reach p, of ties the lower ids; Holtzman et al.,
arXiv:1904.09751), min-p (Nguyen et al., arXiv:2407.01082). `probabilities` says in float64 what they mean.

`choose` is the law that draws follow. A token weighs 2^43 times its probability over that of the likeliest,
cut to an integer: sums of integers are exact in any order, so it is the same token whoever computes it, alone
or in a batch. Each filter keeps the likeliest tokens down to an edge; the token drawn is the one in whose
stretch the random number falls, stretches being laid out in the order of ids. On CPUs the C++ operator
`penstock::draw` follows the same law without sorting a vocabulary; here it is in plain torch, for machines
without a compiler and other devices.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from torch.nn import functional

from penstock.engine.sampling import Sampling
from penstock.nn import native

_COLDEST, _HOTTEST = 1e-30, 1e30
"""float32 has little room beyond; there the likeliest alone is drawn, or all that are possible alike."""
_HALVING = (2017903, 19743522, 118729907, 515776670, 1488514207, 2147483648)
"""2^-t for t from 0 to 1, in parts of 2^31, by Horner with alternating signs: fitted for the least relative
error, 1e-7, with 1 and 1/2 at the ends; rounding down at each step, it still falls strictly."""


def probabilities(logits: Float[Tensor, "vocab"], sampling: Sampling) -> Float64[Tensor, "vocab"]:
    """Return the probability of each token after the filters; at temperature 0 all is on the likeliest."""
    scores = logits.double()
    if sampling.temperature == 0:
        return functional.one_hot(scores.argmax(), len(scores)).double()
    scores = (scores - scores.max()) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        ordered, order = scores.sort(descending=True, stable=True)
        after = ordered.softmax(0).flip(0).cumsum(0).flip(0)
        behind = after <= 1 - sampling.top_p
        behind[0] = False  # the likeliest stays, however small p is
        scores = scores.masked_fill(torch.zeros_like(behind).scatter(0, order, behind), -torch.inf)
    found = scores.softmax(0)
    if sampling.min_p > 0:
        found = found.where(found >= sampling.min_p * found.max(), 0)
    return found / found.sum()


def choose(
    logits: Float[Tensor, "rows vocab"], settings: Sequence[Sampling] | None, numbers: Sequence[float] = ()
) -> Int64[Tensor, "rows"]:
    """Draw a token for each row; -1 where a logit is not a number or the largest is not finite.

    Args:
        logits: float32 or bfloat16. -inf: never drawn.
        settings: one per row; None: the likeliest of every row, the lowest of equals.
        numbers: [rows] in [0, 1), which decide what is drawn.
    """
    wanted = None if settings is None else told(settings, numbers, vocab=logits.shape[1])
    is_of_type = logits.dtype in (torch.float32, torch.bfloat16)
    if is_of_type and logits.device.type == "cpu" and native.is_available():
        return torch.ops.penstock.draw(logits, wanted)  # type: ignore[no-any-return]
    return choose_plain(logits, wanted)


def choose_plain(
    logits: Float[Tensor, "rows vocab"], settings: Float64[Tensor, "rows 5"] | None
) -> Int64[Tensor, "rows"]:
    """Draw in plain torch, as the operator draws.

    Args:
        settings: as of `told`; None: the likeliest of every row.
    """
    logits = logits.float()
    best, tokens = logits.max(-1)  # NaN where any is
    finite = best.isfinite()
    if settings is not None:
        settings = settings.to(logits.device)
        drawing = (settings[:, 0] > 0) & finite
        filtered = (settings[:, 1] < logits.shape[1]) | (settings[:, 2] < 1) | (settings[:, 3] > 0)
        for rows, draw in ((drawing & ~filtered, _unfiltered), (drawing & filtered, _filtered)):
            if bool(rows.any()):
                tokens[rows] = draw(logits[rows], settings[rows])
    return tokens.where(finite, -1)


def told(settings: Sequence[Sampling], numbers: Sequence[float], *, vocab: int) -> Float64[Tensor, "rows 5"]:
    """Return settings as numbers.

    Per row: what logits are multiplied by to be powers of two (0: the likeliest is drawn), top-k, top-p,
    min-p, and the random number.
    """
    return torch.from_numpy(
        np.array(
            [
                (_scale(s.temperature), s.top_k or vocab, s.top_p, s.min_p, number)
                for s, number in zip(settings, numbers, strict=True)
            ],
            dtype=np.float64,
        ).reshape(-1, 5)
    )


def weights(
    logits: Float[Tensor, "rows vocab"], most: Float[Tensor, "rows 1"], scale: Float[Tensor, "rows 1"]
) -> Int64[Tensor, "rows vocab"]:
    """Return 2^(43 - scale * (most - logits)), cut to integers.

    >>> weights(torch.tensor([[0.0, -1.0, -44.0]]), torch.zeros(1, 1), torch.ones(1, 1)).log2().tolist()
    [[43.0, 42.0, -inf]]
    """
    fixed = ((most - logits) * scale).clamp(max=63.0).mul_(2.0**24).long()
    part = fixed & 0xFFFFFF
    halved = torch.full_like(fixed, _HALVING[0])
    for coefficient in _HALVING[1:]:
        halved.mul_(part).bitwise_right_shift_(24).neg_().add_(coefficient)
    return halved.bitwise_left_shift_(12).bitwise_right_shift_(fixed >> 24)


def _scale(temperature: float) -> float:
    if temperature == 0:
        return 0.0
    return 1 / (math.log(2) * min(max(temperature, _COLDEST), _HOTTEST))


def _unfiltered(
    logits: Float[Tensor, "rows vocab"], told: Float64[Tensor, "rows 5"]
) -> Int64[Tensor, "rows"]:
    found = weights(logits, logits.amax(-1, keepdim=True), told[:, :1].float())
    return _look_up(found, told[:, 4:])


def _filtered(logits: Float[Tensor, "rows vocab"], told: Float64[Tensor, "rows 5"]) -> Int64[Tensor, "rows"]:
    scale, top_k, top_p, min_p, numbers = (told[:, i : i + 1] for i in range(5))
    values, ids = logits.sort(descending=True, stable=True)
    found = weights(values, values[:, :1], scale.float())
    last = values.gather(1, top_k.long().clamp(max=values.shape[1]) - 1)
    found *= values >= last
    totals = found.sum(-1, keepdim=True)
    # p = 1 keeps all, which the rounding of a total to float64 must not undo
    limits = (top_p * totals.double()).ceil().long().minimum(totals).where(top_p < 1, totals)
    found *= found.cumsum(-1) - found < limits
    found *= found >= (min_p * 2.0**43).ceil()
    return _look_up(torch.zeros_like(found).scatter_(1, ids, found), numbers)


def _look_up(found: Int64[Tensor, "rows vocab"], numbers: Float64[Tensor, "rows 1"]) -> Int64[Tensor, "rows"]:
    sums = found.cumsum(-1)
    totals = sums[:, -1:]
    # a product that rounds up to the total falls on the last that can be drawn
    targets = (numbers * totals.double()).long().minimum(totals - 1)
    return torch.searchsorted(sums, targets, right=True)[:, 0]
