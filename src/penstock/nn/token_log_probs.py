"""Log-probabilities of single tokens with a graph; the logits of the whole batch never exist.

Preference losses are functions of the log-probabilities of whole answers, so the gradient of a token's is
known only after the loss. The forward pass keeps a token's log-normaliser, one number; the backward pass
computes each chunk's logits again and from them the gradient. That is a fourth product besides the three of
cross_entropy.py, for the learned tokens only: others are left out of all four.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.nn.head import OutputHead, Terms
from penstock.nn.loss_chunks import chunk_tokens
from penstock.nn.term_gradients import NUM_TERMS, TermGradients


def token_log_probs(
    hidden: Float[Tensor, "tokens hidden"],
    head: OutputHead,
    labels: Int[Tensor, "tokens"],
    *,
    ignored: int = -100,
    tokens_at_once: int | None = None,
) -> Float[Tensor, "tokens"]:
    """Return the log-probability of each label in nats, 0 where it is ignored; arguments as `cross_entropy`.

    The result is float32, or float64 if the hidden states are; it can be differentiated once.
    """
    size = tokens_at_once or chunk_tokens(head.weight.shape[0], on_cpu=hidden.device.type == "cpu")
    learned = (labels != ignored).nonzero()[:, 0]
    terms = head.terms(hidden[learned])
    found: Tensor = _TokenLogProbs.apply(*terms, head, labels[learned].long(), size)  # type: ignore[no-untyped-call]
    return found.new_zeros(len(labels)).index_copy(0, learned, found)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:  # Any: torch adds the attributes
        terms, (head, labels, size) = Terms._make(given[:NUM_TERMS]), given[NUM_TERMS:]
        hidden = terms.hidden
        exact = torch.promote_types(hidden.dtype, torch.float32)
        picked, normaliser = (torch.empty(len(labels), dtype=exact, device=hidden.device) for _ in range(2))
        for start in range(0, len(labels), size):
            part = slice(start, start + size)
            logits = head.logits(terms.products(part), terms).to(exact)
            own, here = _rows_here(labels[part], head, num_rows=len(terms.weight))
            picked[part] = head.vocabulary.total(torch.where(here, logits.gather(1, own)[:, 0], 0.0))
            largest = head.vocabulary.largest(logits.amax(1))
            logits -= largest[:, None]
            normaliser[part] = largest + head.vocabulary.total(logits.exp_().sum(1)).log()
        ctx.save_for_backward(*terms, labels, normaliser)
        ctx.head, ctx.size = head, size
        return picked - normaliser

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        *saved, labels, normaliser = ctx.saved_tensors
        terms, head, size = Terms._make(saved), ctx.head, ctx.size
        gradients = TermGradients(terms, ctx.needs_input_grad[:NUM_TERMS], exact=normaliser.dtype)
        for start in range(0, len(labels), size):
            part = slice(start, start + size)
            products = terms.products(part)  # the same logits as before
            slope = head.logits(products, terms).to(normaliser.dtype)
            of_cap = head.slope(slope)
            slope -= normaliser[part, None]
            slope.exp_()
            own, here = _rows_here(labels[part], head, num_rows=len(terms.weight))
            slope.scatter_add_(1, own, -here.to(slope.dtype)[:, None])  # the softmax, minus 1 at the label
            slope *= (upstream[part] / -head.logits_scaling)[:, None]
            gradients.add(part, slope if of_cap is None else slope.mul_(of_cap), products)
        found = (
            None if gradient is None or term is None else gradient.to(term.dtype)
            for gradient, term in zip(gradients.all(), terms, strict=True)
        )
        return *found, None, None, None


def _rows_here(labels: Tensor, head: OutputHead, *, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return each label's row of the matrix on this rank, [tokens, 1], and whether it is here, [tokens]."""
    own = labels - head.vocabulary.first
    here = (own >= 0) & (own < num_rows)
    return torch.where(here, own, 0)[:, None], here
