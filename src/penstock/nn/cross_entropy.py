"""Cross entropy from hidden states and the output matrix; the logits of the whole batch never exist.

The logits of a batch are its largest tensor: 8,192 tokens x 128,256 ids are 4.2 GB in float32, and the
plain loss holds them two to four times. Here the tokens are projected in chunks, and a chunk's contribution
to both gradients is computed while its logits exist: the softmax minus one at the label is the gradient. So
each logit is computed once and the work equals that of the plain loss, three products. Recomputation in the
backward pass would be a fourth (the idea of Liger Kernel, Hsu et al., arXiv:2410.10989).

Costs: the gradient of an output matrix that is learned is held in float32 from the loss to its backward pass.
Only the sum of the losses can be differentiated, not a function of *single* losses; see token_log_probs.py
for those.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.nn.compiled import fused
from penstock.nn.head import OutputHead, Terms, Vocabulary, Whole
from penstock.nn.loss_chunks import chunk_tokens
from penstock.nn.term_gradients import NUM_TERMS, TermGradients
from penstock.nn.triton_support import has_triton


def cross_entropy(
    hidden: Float[Tensor, "tokens hidden"],
    head: OutputHead,
    labels: Int[Tensor, "tokens"],
    *,
    ignored: int = -100,
    tokens_at_once: int | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, "tokens"]]:
    """Return the summed cross entropy in nats, and the loss of each token without a graph.

    Both are float32, or float64 if the hidden states are. Softmax, sums and the gradient of the output
    matrix have that dtype too; products have the dtype of `hidden`.

    Args:
        labels: token ids of the whole vocabulary, also when the head holds only some rows; int64 or int32.
        ignored: a label that counts as 0 and gives no gradient.
        tokens_at_once: chunk size in tokens. None: `chunk_tokens` of the vocabulary.
    """

    is_fused = isinstance(head.vocabulary, Whole) and has_triton(hidden.device)
    work = fused(_losses_to_compile, _losses) if is_fused else _losses

    def losses(logits: Tensor, part: slice, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        return work(logits, labels[part], head.vocabulary, head.logits_scaling, ignored=ignored, keep=keep)

    return chunked_loss(hidden, head, losses, tokens_at_once=tokens_at_once, is_fused=is_fused)


Losses = Callable[..., tuple[Tensor, Tensor | None]]
"""Function (logits [chunk, vocab], slice of the tokens, keep=bool) -> loss of each token [chunk] in float32,
or float64 for such logits; and, with `keep`, the gradient of their sum by the products of the head before a
softcap, in the dtype of the logits. It may overwrite the logits."""


def chunked_loss(
    hidden: Float[Tensor, "tokens hidden"],
    head: OutputHead,
    losses: Losses,
    *,
    tokens_at_once: int | None = None,
    is_fused: bool = False,
) -> tuple[Float[Tensor, ""], Float[Tensor, "tokens"]]:
    """Return the sum of a loss that is a function of each token's logits, and each token's, as
    `cross_entropy`."""
    on_cpu = hidden.device.type == "cpu"
    size = tokens_at_once or chunk_tokens(head.weight.shape[0], on_cpu=on_cpu, is_fused=is_fused)
    wants = torch.is_grad_enabled()  # gradients are always off inside an autograd function
    total, each = _ChunkedLoss.apply(*head.terms(hidden), head, losses, size, wants)  # type: ignore[no-untyped-call]
    return total, each


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:  # Any: torch adds the attributes
        terms, (head, losses, size, wants) = Terms._make(given[:NUM_TERMS]), given[NUM_TERMS:]
        hidden = terms.hidden
        exact = torch.promote_types(hidden.dtype, torch.float32)
        each = torch.empty(len(hidden), dtype=exact, device=hidden.device)
        wanted = [wants and needed for needed in ctx.needs_input_grad[:NUM_TERMS]]
        gradients = TermGradients(terms, wanted, exact=exact)
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            products = terms.products(part)
            logits = head.logits(products, terms)
            if terms.factors is not None:  # their gradient is a sum over tokens
                logits = logits.to(exact)
            of_cap = head.slope(logits) if any(wanted) else None  # before the loss overwrites the logits
            each[part], slope = losses(logits, part, keep=any(wanted))
            if slope is not None:
                gradients.add(part, slope if of_cap is None else slope.mul_(of_cap), products)
            del logits, slope, products, of_cap  # before the next chunk's, which are as large
        ctx.save_for_backward(*gradients.all())
        ctx.dtypes = [term.dtype if term is not None else None for term in terms]
        ctx.mark_non_differentiable(each)
        return each.sum(), each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # in place: no other reader exists, and a second copy of the output matrix's gradient is large
        found = (
            None if gradient is None else _scaled(gradient, upstream, dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *found, None, None, None, None


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient times a scalar in a dtype, in one pass.

    On GPUs torch's kernel that casts too reads the numbers one by one: for the output matrix of 8B it took
    2.2 ms on an H200, three times the memory's time.
    """
    if gradient.dtype == dtype:
        return gradient.mul_(factor)
    work = fused(_product_to_compile, _product) if has_triton(gradient.device) else _product
    return work(gradient, factor, dtype)


def _product(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


def _product_to_compile(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return (gradient * factor).to(dtype)


def _losses(
    logits: Tensor, labels: Tensor, vocabulary: Vocabulary, scaling: float, *, ignored: int, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of each token, and with `keep` the gradient of their sum by `scaling` x logits."""
    dtype = logits.dtype
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    seen, own = labels != ignored, labels.long() - vocabulary.first
    here = seen & (own >= 0) & (own < logits.shape[1])
    own = torch.where(here, own, 0)[:, None]
    logits -= vocabulary.largest(logits.amax(1))[:, None]
    picked = vocabulary.total(torch.where(here, logits.gather(1, own)[:, 0], 0.0))
    sums = vocabulary.total(logits.exp_().sum(1))
    each = torch.where(seen, sums.log() - picked, 0.0)
    if not keep:
        return each, None
    logits *= (seen / (sums * scaling))[:, None]
    logits.scatter_add_(1, own, here.to(logits.dtype)[:, None] / -scaling)
    return each, logits.to(dtype)


def _losses_to_compile(
    logits: Tensor, labels: Tensor, vocabulary: Vocabulary, scaling: float, *, ignored: int, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return what `_losses` does for a whole vocabulary, written so that the compiler makes one kernel of it.

    Nothing is written in place or scattered: each would be a pass of its own over the logits.
    """
    del vocabulary
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    seen = labels != ignored
    own = torch.where(seen, labels.long(), 0)[:, None]
    largest = x.amax(1, keepdim=True)
    sums = (x - largest).exp().sum(1, keepdim=True)
    each = torch.where(seen, (sums.log() + largest - x.gather(1, own))[:, 0], 0.0)
    if not keep:
        return each, None
    is_own = torch.arange(x.shape[1], device=x.device)[None] == own
    slope = ((x - largest).exp() / sums - is_own.to(x.dtype)) / scaling
    return each, torch.where(seen[:, None], slope, 0.0).to(logits.dtype)
