"""Attention whose scores have a softcap, forward and backward, in plain PyTorch on any device.

PyTorch's fused kernels have no such step. Here QUERIES at a time see the keys of their document, so
memory is linear in the length of a row. Scores, softmax and sums are float32, or float64. With s the scaled
score, t = tanh(s / cap) and p = softmax(cap t), the gradient by s is

    p * (dp - sum(p dp)) * (1 - t^2)        dp = upstream @ values

The backward pass computes p again from the log-sums that the forward pass keeps. For the rest of PyTorch this
is one operator, for the reasons given in varlen_cpu.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor
from torch.nn.functional import pad

from penstock.nn.kernels.layout import AttentionLayout
from penstock.nn.score_chunks import QUERIES
from penstock.nn.softcap import capped


@dataclass(frozen=True, slots=True)
class Capped:
    """Causal attention inside each document, with a softcap on the scores."""

    ends: Int32[Tensor, "tokens_plus_1"]
    """Ends of documents over the flattened batch, from 0, on the host; padded with copies of the last."""
    window: int | None
    """As in `AttentionLayout`."""

    def __call__(
        self,
        q_bhld: Tensor,
        k_bksd: Tensor,
        v_bksd: Tensor,
        *,
        scale: float,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attend within each document; q is [b, h, l, d], k and v are [b, k, l, d]."""
        assert softcap is not None and sinks is None, "the kernel of layers with a softcap alone"  # noqa: PT018
        batch, _, seq_len, _ = q_bhld.shape
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q_bhld, k_bksd, v_bksd))
        out, _ = torch.ops.penstock.attend_capped(q, k, v, self.ends, self.window or 0, scale, softcap)
        return out.view(batch, seq_len, *out.shape[1:]).transpose(1, 2)  # type: ignore[no-any-return]


def with_softcap(layout: AttentionLayout) -> Capped:
    """Return the kernel of any layout; without `cu_seqlens`, each row is a document. Waits for the device."""
    tokens, ends = layout.batch * layout.seq_len, layout.cu_seqlens
    if ends is None:
        ends = torch.arange(0, tokens + 1, layout.seq_len)
    ends = ends.int().cpu()
    ends = pad(ends, (0, max(0, tokens + 1 - len(ends))), value=tokens)
    return Capped(ends, layout.window if layout.is_windowed else None)


def attend_capped(
    q_bhld: Tensor,
    k_bksd: Tensor,
    v_bksd: Tensor,
    mask: Bool[Tensor, "... queries keys"] | None,
    *,
    scale: float,
    softcap: float,
) -> Float[Tensor, "b h l d"]:
    """Attend step by step, with all scores at once, for the engine and as the reference of the others.

    Args:
        mask: queries see the keys where it is True; None: all.
    """
    exact = torch.promote_types(q_bhld.dtype, torch.float32)
    group = q_bhld.shape[1] // k_bksd.shape[1]
    k, v = (t.to(exact).repeat_interleave(group, dim=1) for t in (k_bksd, v_bksd))
    scores = capped(q_bhld.to(exact) @ k.mT * scale, softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).to(q_bhld.dtype)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Queries of one document, the keys that any of them sees, and which each of them sees."""

    queries: slice
    keys: slice
    sees: Bool[Tensor, "queries keys"]


def _chunks(ends: Tensor, window: int, device: torch.device) -> Iterator[_Chunk]:
    for first, past in pairwise(torch.unique_consecutive(ends).tolist()):
        for start in range(first, past, QUERIES):
            stop = min(start + QUERIES, past)
            since = max(first, start - window + 1) if window else first
            keys = torch.arange(since, stop, device=device)
            queries = keys[start - since :, None]
            sees = keys <= queries
            yield _Chunk(
                slice(start, stop), slice(since, stop), sees & (keys > queries - window) if window else sees
            )


def _attend(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, window: int, scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Attend; q is [tokens, heads, dim], k and v [tokens, fewer heads, dim]."""
    out, sums = _made(q, k)
    exact, groups = sums.dtype, k.shape[1]
    into, q, k, v = (_grouped(t, groups) for t in (out, q, k, v))
    for chunk in _chunks(ends, window, q.device):
        here, there = chunk.queries, chunk.keys
        queries, keys, values = (_rows(t, part, exact) for t, part in ((q, here), (k, there), (v, there)))
        scores = (queries.mul(scale / cap) @ keys.mT).tanh_().mul_(cap)
        of_heads = scores.view(groups, -1, *chunk.sees.shape).masked_fill_(~chunk.sees, -torch.inf)
        most = of_heads.amax(-1, keepdim=True)
        total = of_heads.sub_(most).exp_().sum(-1, keepdim=True)
        sums[:, :, here] = total.log().add_(most).squeeze(-1)
        into[:, :, here] = (scores @ values).view(*into[:, :, here].shape).div_(total).to(out.dtype)
    return out, sums


def _attend_backward(
    upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
    ends: Tensor, window: int, scale: float, cap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v."""
    exact, groups = sums.dtype, k.shape[1]
    dk, dv = (torch.zeros_like(t, dtype=exact, memory_format=torch.contiguous_format) for t in (k, v))
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    found = dq, dk, dv
    upstream, q, k, v, out, dq, dk, dv = (_grouped(t, groups) for t in (upstream, q, k, v, out, *found))
    for chunk in _chunks(ends, window, q.device):
        here, there = chunk.queries, chunk.keys
        queries, keys, values, up, product = (
            _rows(t, part, exact)
            for t, part in ((q, here), (k, there), (v, there), (upstream, here), (out, here))
        )
        queries = queries.mul(scale / cap)
        tanh = (queries @ keys.mT).tanh_()
        weights = tanh * cap
        of_heads = weights.view(groups, -1, *chunk.sees.shape)
        of_heads.sub_(sums[:, :, here, None]).exp_().masked_fill_(~chunk.sees, 0.0)
        dv[:, 0, there] += weights.mT @ up
        slope = (up @ values.mT).sub_((up * product).sum(-1, keepdim=True))
        slope.mul_(weights.addcmul_(weights, tanh.square_(), value=-1))  # by 1 - tanh^2
        dq[:, :, here] = (slope @ keys).mul_(scale).view(*dq[:, :, here].shape).to(dq.dtype)
        dk[:, 0, there] += (slope.mT @ queries).mul_(cap)
    return found[0], found[1].to(k.dtype), found[2].to(v.dtype)


def _made(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Return empty tensors for the output and for the log-sums of the softmax."""
    tokens, heads, _dim = q.shape
    sums = q.new_empty(
        k.shape[1], heads // k.shape[1], tokens, dtype=torch.promote_types(q.dtype, torch.float32)
    )
    return torch.empty_like(q, memory_format=torch.contiguous_format), sums


def _room(_upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[tokens, heads, dim] -> [groups, heads of a group, tokens, dim], a view."""
    return x.view(len(x), groups, -1, x.shape[-1]).permute(1, 2, 0, 3)


def _rows(x: Tensor, part: slice, dtype: torch.dtype) -> Tensor:
    """[groups, heads of a group, tokens, dim] -> [groups, heads x tokens of the part, dim], a copy."""
    return x[:, :, part].to(dtype).flatten(1, 2)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # Any: torch's
    *tensors, ctx.window, ctx.scale, ctx.cap = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _back(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, ends, out, sums = ctx.saved_tensors
    found = torch.ops.penstock.attend_capped_backward(
        upstream, q, k, v, out, sums, ends, ctx.window, ctx.scale, ctx.cap
    )
    return *found, None, None, None, None


_GIVEN = "Tensor ends, SymInt window, float scale, float cap"
for _name, _schema, _kernel, _shape in (
    (
        "penstock::attend_capped",
        f"(Tensor q, Tensor k, Tensor v, {_GIVEN}) -> (Tensor, Tensor)",
        _attend,
        _made,
    ),
    (
        "penstock::attend_capped_backward",
        "(Tensor upstream, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, "
        f"{_GIVEN}) -> (Tensor, Tensor, Tensor)",
        _attend_backward,
        _room,
    ),
):
    torch.library.define(_name, _schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(_name, "CompositeExplicitAutograd", _kernel)
    torch.library.register_fake(_name, _shape)
torch.library.register_autograd("penstock::attend_capped", _back, setup_context=_keep)
