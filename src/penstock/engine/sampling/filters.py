"""Sampling under temperature, top-k, top-p and min-p: the exact distribution, and how tokens are sampled.

Filters apply in the order of transformers: temperature, top-k (ties at the k-th value stay), top-p (the
fewest likeliest tokens whose probabilities reach p; of ties the lower ids; Holtzman et al.,
arXiv:1904.09751), min-p (Nguyen et al., arXiv:2407.01082). `probabilities` is their definition in float64.

`choose` samples in integers. A token's weight is 2^43 times its probability over that of the likeliest token,
truncated to an integer. Integer sums are exact in any order, so the same token is sampled in any batch and on
any device. Each filter keeps the likeliest tokens down to a threshold; weights are laid out as intervals in
the order of ids, and the token whose interval contains the random number is sampled. On CPUs the C++ operator
`penstock::draw` does the same without sorting the vocabulary, on GPUs the kernel of `sampling.draw_triton`.
The torch code here is for machines without a compiler and for other devices.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from torch.nn import functional

from penstock.engine.sampling_params import Sampling
from penstock.nn import native
from penstock.nn.triton_support import has_triton
from penstock.nn.upload import uploaded

_COLDEST, _HOTTEST = 1e-30, 1e30
"""Limits of the temperature in float32; beyond them sampling is greedy, or uniform over possible tokens."""
_ROWS_AT_ONCE = 64
"""Rows that plain torch samples at once, which bounds its memory: some 60 bytes for each logit."""
_HALVING = (2017903, 19743522, 118729907, 515776670, 1488514207, 2147483648)
"""Coefficients of 2^-t for t from 0 to 1, in units of 2^-31, by Horner with alternating signs: fitted for the
least relative error, 1e-7, with exact ends 1 and 1/2. With rounding down at each step it is still strictly
decreasing."""


def probabilities(logits: Float[Tensor, "vocab"], sampling: Sampling) -> Float64[Tensor, "vocab"]:
    """Return the probability of each token after the filters; temperature 0 puts all on the likeliest."""
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
        behind[0] = False  # the likeliest token stays, however small p is
        scores = scores.masked_fill(torch.zeros_like(behind).scatter(0, order, behind), -torch.inf)
    found = scores.softmax(0)
    if sampling.min_p > 0:
        found = found.where(found >= sampling.min_p * found.max(), 0)
    return found / found.sum()


def choose(
    logits: Float[Tensor, "rows vocab"], settings: Sequence[Sampling] | None, numbers: Sequence[float] = ()
) -> Int64[Tensor, "rows"]:
    """Sample a token for each row; -1 where a logit is NaN or the largest is not finite.

    Args:
        logits: float32 or bfloat16. -inf: never sampled.
        settings: one per row; None: greedy, the lowest id of equals.
        numbers: [rows] random numbers in [0, 1).
    """
    return sample(logits, None if settings is None else settings_tensor(settings, numbers))


def sample(
    logits: Float[Tensor, "rows vocab"], settings: Float64[Tensor, "rows 5"] | None
) -> Int64[Tensor, "rows"]:
    """Sample as `choose` does.

    Args:
        settings: from `settings_tensor`; None: greedy.
    """
    if settings is None:
        return draw(logits, None)
    array = settings.numpy()
    has_filters = bool(((array[:, 1] < logits.shape[1]) | (array[:, 2] < 1) | (array[:, 3] > 0)).any())
    return draw(logits, uploaded([array], logits.device)[0], has_filters=has_filters)


def draw(
    logits: Float[Tensor, "rows vocab"],
    settings: Float64[Tensor, "rows 5"] | None,
    *,
    has_filters: bool = True,
) -> Int64[Tensor, "rows"]:
    """Sample as `choose` does; the host waits for nothing, so that a CUDA graph can record it.

    Logits of other types are rounded to float32 first, so that the likeliest token of a row is the same
    whether other rows are greedy or not.

    Args:
        settings: from `settings_tensor`, on the device of the logits; None: greedy.
        has_filters: False: no row has top-k, top-p or min-p, which saves time and changes no token.
    """
    if logits.dtype not in (torch.float32, torch.bfloat16):
        logits = logits.float()
    if logits.device.type == "cpu" and native.is_available():
        return torch.ops.penstock.draw(logits, settings)  # type: ignore[no-any-return]
    if has_triton(logits.device):
        from penstock.engine.sampling import draw_triton  # takes a second that CPUs do not spend

        return draw_triton.draw(logits, settings)
    return choose_plain(logits, settings, has_filters=has_filters)


def choose_plain(
    logits: Float[Tensor, "rows vocab"],
    settings: Float64[Tensor, "rows 5"] | None,
    *,
    has_filters: bool = True,
) -> Int64[Tensor, "rows"]:
    """Sample in plain torch, with the operator's results; arguments as in `draw`."""
    if settings is None:
        best, tokens = logits.max(-1)  # NaN where any is
        return tokens.where(best.isfinite(), -1)
    parts = zip(torch.split(logits, _ROWS_AT_ONCE), torch.split(settings, _ROWS_AT_ONCE), strict=True)
    return torch.cat([_drawn(part.float(), wanted, has_filters) for part, wanted in parts])


def settings_tensor(
    settings: Sequence[Sampling], numbers: Sequence[float], *, vocab: int = 2**31
) -> Float64[Tensor, "rows 5"]:
    """Return sampling settings as a tensor on the CPU.

    Columns: factor from logits to powers of two (0: greedy), top-k, top-p, min-p, random number.

    Args:
        vocab: top-k of rows without one; at least the number of token ids.
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
    """Return 2^(43 - scale * (most - logits)), truncated to integers.

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


def _drawn(
    logits: Float[Tensor, "rows vocab"], settings: Float64[Tensor, "rows 5"], has_filters: bool
) -> Int64[Tensor, "rows"]:
    """Sample rows of float32; -1 where no token can be sampled."""
    best, likeliest = logits.max(-1)  # NaN where any is
    if has_filters:
        found = _filtered(logits, settings)
    else:
        found = weights(logits, best[:, None], settings[:, :1].float())
    tokens = _look_up(found, settings[:, 4:])
    return tokens.where(settings[:, 0] > 0, likeliest).where(best.isfinite(), -1)


def _filtered(
    logits: Float[Tensor, "rows vocab"], settings: Float64[Tensor, "rows 5"]
) -> Int64[Tensor, "rows vocab"]:
    """Return the weight of each token; 0 where a filter excludes it."""
    scale, top_k, top_p, min_p = (settings[:, i : i + 1] for i in range(4))
    values, ids = logits.sort(descending=True, stable=True)
    found = weights(values, values[:, :1], scale.float())
    last = values.gather(1, top_k.long().clamp(max=values.shape[1]) - 1)
    found *= values >= last
    totals = found.sum(-1, keepdim=True)
    # p = 1 keeps all tokens; rounding a total to float64 must not change that
    limits = (top_p * totals.double()).ceil().long().minimum(totals).where(top_p < 1, totals)
    found *= found.cumsum(-1) - found < limits
    found *= found >= (min_p * 2.0**43).ceil()
    return torch.zeros_like(found).scatter_(1, ids, found)


def _look_up(found: Int64[Tensor, "rows vocab"], numbers: Float64[Tensor, "rows 1"]) -> Int64[Tensor, "rows"]:
    sums = found.cumsum(-1)
    totals = sums[:, -1:]
    # a product that rounds up to the total selects the last possible token
    targets = (numbers * totals.double()).long().minimum(totals - 1)
    return torch.searchsorted(sums, targets, right=True)[:, 0]
