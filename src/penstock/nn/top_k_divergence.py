"""Divergence of a student from a teacher that is known by its most likely tokens.

The teacher gives, for each token, the ids S and the log-probabilities log q of its k most likely tokens. All
other tokens count as one, the rest, with the mass that is left: the loss is the forward Kullback-Leibler
divergence over these k + 1 events,

    sum over S of q (log q - log p)  +  q_rest (log q_rest - log p_rest),   p = softmax(logits / temperature)

as in TRL with `loss_add_tail`. Without the rest a student could satisfy the loss with any mass outside S. Its
gradient by logit / temperature is p - q within S and p (1 - q_rest / p_rest) outside. As in cross_entropy.py
the logits of all tokens never exist.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from penstock.nn.cross_entropy import chunked_loss
from penstock.nn.head import OutputHead

_MIN_REST = 1e-6
"""Mass below which the teacher has no rest: the rounding error of a sum of float32 probabilities."""


def top_k_divergence(
    hidden: Float[Tensor, "tokens hidden"],
    head: OutputHead,
    teacher_ids: Int[Tensor, "tokens k"],
    teacher_log_probs: Float[Tensor, "tokens k"],
    *,
    temperature: float = 1.0,
    tokens_at_once: int | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, "tokens"]]:
    """Return the summed divergence in nats, and that of each token without a graph.

    Args:
        teacher_ids: distinct token ids of the whole vocabulary, also when the head holds only some rows.
        teacher_log_probs: at the same temperature.
    """

    def losses(logits: Tensor, part: slice, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        return _losses(
            logits, teacher_ids[part], teacher_log_probs[part], head, temperature=temperature, keep=keep
        )

    return chunked_loss(hidden, head, losses, tokens_at_once=tokens_at_once)


def _losses(
    logits: Tensor, ids: Tensor, log_q: Tensor, head: OutputHead, *, temperature: float, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of each token and, with `keep`, their sum's gradient by the head's products."""
    dtype = logits.dtype
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    vocabulary, log_q = head.vocabulary, log_q.to(logits.dtype)
    own = ids.long() - vocabulary.first
    here = (own >= 0) & (own < logits.shape[1])
    own = torch.where(here, own, 0)
    logits /= temperature
    logits -= vocabulary.largest(logits.amax(1))[:, None]
    picked = vocabulary.total(torch.where(here, logits.gather(1, own), 0.0))
    logits.exp_()
    within = torch.where(here, logits.gather(1, own), 0.0)
    logits.scatter_add_(1, own, -within)  # exactly 0: what remains is the rest, without cancellation
    rest, sums = vocabulary.total(torch.stack((logits.sum(1), within.sum(1))))
    sums = sums + rest
    q = log_q.exp()
    q_rest = 1 - q.sum(1)
    q_rest = torch.where(q_rest > _MIN_REST, q_rest, 0.0)
    p_rest = (rest / sums).clamp(min=torch.finfo(logits.dtype).tiny)
    each: Tensor = (q * (log_q - picked + sums.log()[:, None])).sum(1)
    each = each + torch.where(q_rest > 0, q_rest * (q_rest / p_rest).log(), 0.0)
    if not keep:
        return each, None
    logits *= ((1 - q_rest / p_rest) / sums)[:, None]
    logits.scatter_add_(1, own, torch.where(here, within / sums[:, None] - q, 0.0))
    logits /= temperature * head.logits_scaling
    return each, logits.to(dtype)
