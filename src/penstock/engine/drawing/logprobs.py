"""Say how likely tokens were to the model itself: before biases, penalties, temperature and filters."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from penstock.engine.request import TokenLogprob


def logprobs_of(
    logits: Float[Tensor, "rows vocab"], tokens: Sequence[int], *, num_top: int
) -> list[TokenLogprob]:
    """Return the log-probability of one token per row, beside the `num_top` likeliest.

    They are computed in float32 whatever the logits are in. Equal logits share a rank; among the
    likeliest they come in no particular order.
    """
    logits = logits.float()
    drawn = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, drawn)
    ranks = (logits > own).sum(-1) + 1
    best = logits.topk(min(num_top, logits.shape[1]))
    top_ids, top_values = best.indices.tolist(), (best.values - total).clamp(max=0).tolist()
    return [
        TokenLogprob(token=token, logprob=logprob, rank=rank, top=dict(zip(ids, values, strict=True)))
        for token, (logprob,), rank, ids, values in zip(
            tokens, (own - total).clamp(max=0).tolist(), ranks.tolist(), top_ids, top_values, strict=True
        )
    ]
