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
from jaxtyping import Bool, Int32
from torch import Tensor
from torch.nn.functional import pad

from penstock.nn.kernels.layout import AttentionLayout
from penstock.nn.score_chunks import QUERIES


@dataclass(frozen=True, slots=True)
class Capped:
    """Causal attention inside each document, with a softcap on the scores; no model has sinks too."""

    ends: Int32[Tensor, "tokens_plus_1"]
    """Ends of documents over the flattened batch, from 0, on the host; padded with copies of the last."""
    row: int
    """Tokens of a row."""
    first: int
    """First query of each row; keys are those of the row before `past`."""
    past: int
    """End of the queries of each row."""
    window: int | None
    """As in `AttentionLayout`."""

    def __call__(
        self,
        q_bhld: Tensor,
        k_bksd: Tensor,
        v_bksd: Tensor,
        *,
        scale: float,
        softcap: float,
    ) -> Tensor:
        """Attend within each document; q is [b, h, l, d], k and v are [b, k, s, d]."""
        batch, _, seq_len, _ = q_bhld.shape
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q_bhld, k_bksd, v_bksd))
        where = self.ends, self.row, self.first, self.past, self.window or 0
        out, _ = torch.ops.penstock.attend_capped(q, k, v, *where, scale, softcap)
        return out.view(batch, seq_len, *out.shape[1:]).transpose(1, 2)  # type: ignore[no-any-return]


def with_softcap(layout: AttentionLayout, *, first: int = 0, past: int | None = None) -> Capped:
    """Return the kernel of any layout; without `cu_seqlens`, each row is a document. Waits for the device.

    Args:
        first: the kernel computes the queries of each row from here,
        past: to here; None: to the end. It takes the keys before `past`.
    """
    tokens, ends = layout.batch * layout.seq_len, layout.cu_seqlens
    if ends is None:
        ends = torch.arange(0, tokens + 1, layout.seq_len)
    ends = ends.int().cpu()
    ends = pad(ends, (0, max(0, tokens + 1 - len(ends))), value=tokens)
    window = layout.window if layout.is_windowed else None
    past = layout.seq_len if past is None else past
    return Capped(ends, row=layout.seq_len, first=first, past=past, window=window)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Queries of one document, the keys that any of them sees, and which each of them sees."""

    queries: slice
    keys: slice
    sees: Bool[Tensor, "queries keys"]


def _chunks(
    ends: Tensor, row: int, first: int, past: int, window: int, device: torch.device
) -> Iterator[_Chunk]:
    for document, end in pairwise(torch.unique_consecutive(ends).tolist()):
        index, begin = divmod(document, row)
        stops = min(past, end - index * row)
        to_query, to_key = index * (past - first) - first, index * past  # from a position in the row
        for start in range(max(begin, first), stops, QUERIES):
            stop = min(start + QUERIES, stops)
            since = max(begin, start - window + 1) if window else begin
            keys = torch.arange(since, stop, device=device)
            queries = keys[start - since :, None]
            sees = keys <= queries
            yield _Chunk(
                slice(start + to_query, stop + to_query),
                slice(since + to_key, stop + to_key),
                sees & (keys > queries - window) if window else sees,
            )


def _attend(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, row: int, first: int, past: int, window: int,
    scale: float, cap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend; q is [tokens, heads, dim], k and v [tokens, fewer heads, dim]; the rest as in `Capped`."""
    out, sums = _made(q, k)
    exact, groups = sums.dtype, k.shape[1]
    into, q, k, v = (_grouped(t, groups) for t in (out, q, k, v))
    for chunk in _chunks(ends, row, first, past, window, q.device):
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
    ends: Tensor, row: int, first: int, past: int, window: int, scale: float, cap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v."""
    exact, groups = sums.dtype, k.shape[1]
    dk, dv = (torch.zeros_like(t, dtype=exact, memory_format=torch.contiguous_format) for t in (k, v))
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    found = dq, dk, dv
    upstream, q, k, v, out, dq, dk, dv = (_grouped(t, groups) for t in (upstream, q, k, v, out, *found))
    for chunk in _chunks(ends, row, first, past, window, q.device):
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
    ctx.rest = inputs[4:]
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.mark_non_differentiable(output[1])


def _back(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, ends, out, sums = ctx.saved_tensors
    found = torch.ops.penstock.attend_capped_backward(upstream, q, k, v, out, sums, ends, *ctx.rest)
    return *found, *(None,) * (1 + len(ctx.rest))


_GIVEN = "Tensor ends, SymInt row, SymInt first, SymInt past, SymInt window, float scale, float cap"
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
