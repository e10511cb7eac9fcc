"""Attention by the formula, with all scores in memory: the reference, and the fallback of other kernels."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from penstock.nn.softcap import capped


def attend_written_out(
    q_bhld: Float[Tensor, "batch heads queries d"],
    k_bhsd: Float[Tensor, "batch heads keys d"],
    v_bhsd: Float[Tensor, "batch heads keys d"],
    mask: Tensor | None,
    *,
    scale: float,
    sinks: Float[Tensor, "heads"] | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "batch heads queries d"]:
    """Attend step by step, in float32 at least; memory of queries x keys.

    Args:
        mask: bool [..., queries, keys], True where a query sees a key; None: all keys are visible.
        sinks: as in sinks.py.
        softcap: as in nn/softcap.py; None: there is none.
    """
    exact = torch.promote_types(q_bhld.dtype, torch.float32)
    scores = capped(q_bhld.to(exact) @ k_bhsd.to(exact).mT * scale, softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    values = v_bhsd.to(exact)
    if sinks is not None:
        of_sinks = sinks.to(exact).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        # the sink's value of 0 is written out too: without its column the weights would be copied
        scores, values = torch.cat((scores, of_sinks), -1), pad(values, (0, 0, 0, 1))
    return (scores.softmax(-1) @ values).to(q_bhld.dtype)
