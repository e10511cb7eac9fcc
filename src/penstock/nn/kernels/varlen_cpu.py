"""Attention one document at a time: the kernel for packed rows and sliding windows on a CPU.

The batch is one row of tokens, cut into chunks that share no work (layout.py). Each chunk goes through
PyTorch's flash kernel for CPUs, forward and backward, and writes to its slice of the output. So the values of
a document do not depend on its neighbours in the row. Key-value heads are never repeated: a group of query
heads reads the same memory through a stride of 0.

For the rest of PyTorch this is one operator, because the chunks change with every batch: traced one by one
they would compile a block anew each time. The ends of documents are an input of constant shape.

The flash kernel is called by its internal name (`aten`), since only that form returns the tensors of the
backward pass; `tests/unit/nn/test_kernels.py` fails if it changes. `benchmarks/attention.py` compares with
the dense mask.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int32
from torch import Tensor
from torch.nn.functional import pad

from penstock.nn.kernels.layout import AttentionLayout, pieces
from penstock.nn.kernels.sinks import add_sinks, sink_gradients

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True, slots=True)
class PerDocument:
    """Causal attention inside each document."""

    ends: Int32[Tensor, "tokens_plus_1"]
    """Ends of documents over the flattened batch, from 0; padded with copies of the last."""
    window: int | None
    """As in `AttentionLayout`."""

    def __call__(
        self, q_bhld: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend within each document; q is [b, h, l, d], k and v are [b, k, l, d], sinks [h]."""
        batch, _, seq_len, _ = q_bhld.shape
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q_bhld, k_bksd, v_bksd))
        out, _ = torch.ops.penstock.attend_documents(q, k, v, sinks, self.ends, self.window or 0, scale)
        return out.view(batch, seq_len, *out.shape[1:]).transpose(1, 2)  # type: ignore[no-any-return]


def per_document(layout: AttentionLayout) -> PerDocument:
    """Return the kernel; without `cu_seqlens`, each row is a document.

    Raises:
        ValueError: `cu_seqlens` does not span the tokens of the batch.
    """
    tokens, ends = layout.batch * layout.seq_len, layout.cu_seqlens
    if ends is None:
        ends = torch.arange(0, tokens + 1, layout.seq_len)
    if ends[0] != 0 or ends[-1] != tokens:
        raise ValueError(f"cu_seqlens ends at {ends[-1]}, not at {layout.batch} x {layout.seq_len} tokens")
    ends = pad(ends.int(), (0, max(0, tokens + 1 - len(ends))), value=tokens)
    return PerDocument(ends, layout.window if layout.is_windowed else None)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ends: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend; q is [tokens, heads, dim], k and v [tokens, fewer heads, dim], sinks [heads]."""
    (out, sums), groups = _made(q, k), k.shape[1]
    q, k, v, into = (_grouped(t, groups) for t in (q, k, v, out))
    for piece in pieces(ends, window, like=q):
        here, there = piece.queries, piece.keys
        into[:, :, here], sums[:, :, here] = _FORWARD(
            q[:, :, here], _like(q, k[:, :, there]), _like(q, v[:, :, there]),
            0.0, piece.mask is None, attn_mask=piece.mask, scale=scale,
        )  # fmt: skip
    if sinks is not None:
        shrunk, sums = add_sinks(into, sums, _of_groups(sinks, groups))
        into.copy_(shrunk)
    return out, sums


def _attend_backward(
    upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
    ends: Tensor, window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v."""
    found: tuple[Tensor, Tensor, Tensor] = _room(upstream, q, k, v)
    groups = k.shape[1]
    upstream, q, k, v, out = (_grouped(t, groups) for t in (upstream, q, k, v, out))
    dq, dk, dv = (_grouped(t.zero_(), groups) for t in found)
    for piece in pieces(ends, window, like=q):
        here, there = piece.queries, piece.keys
        dq[:, :, here], keys, values = _BACKWARD(
            upstream[:, :, here], q[:, :, here], _like(q, k[:, :, there]), _like(q, v[:, :, there]),
            out[:, :, here], sums[:, :, here], 0.0, piece.mask is None, attn_mask=piece.mask, scale=scale,
        )  # fmt: skip
        dk[:, :, there] += keys.sum(1, keepdim=True)
        dv[:, :, there] += values.sum(1, keepdim=True)
    return found


def _made(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Return empty tensors for the output and for the log-sums of the softmax."""
    tokens, heads, _dim = q.shape
    exact = torch.promote_types(q.dtype, torch.float32)
    sums = q.new_empty(k.shape[1], heads // k.shape[1], tokens, dtype=exact)
    return torch.empty_like(q, memory_format=torch.contiguous_format), sums


def _room(_upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # Any: torch's
    *tensors, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _back(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, ends, out, sums = ctx.saved_tensors
    found = torch.ops.penstock.attend_documents_backward(
        upstream, q, k, v, out, sums, ends, ctx.window, ctx.scale
    )
    d_sinks = None
    if sinks is not None:
        groups = k.shape[1]
        each = (_grouped(upstream, groups), _grouped(out, groups), sums, _of_groups(sinks, groups))
        d_sinks = sink_gradients(*each).sum(-1).flatten().to(sinks.dtype)
    return *found, d_sinks, None, None, None


_ATTEND, _ATTEND_BACKWARD = "penstock::attend_documents", "penstock::attend_documents_backward"
_GIVEN = "Tensor ends, SymInt window, float scale"

# not `custom_op`, whose operators load torch's compiler at their first call: two seconds
for _name, _schema, _kernel, _shape in (
    (
        _ATTEND,
        f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_GIVEN}) -> (Tensor, Tensor)",
        _attend,
        _made,
    ),
    (
        _ATTEND_BACKWARD,
        "(Tensor upstream, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, "
        f"{_GIVEN}) -> (Tensor, Tensor, Tensor)",
        _attend_backward,
        _room,
    ),
):
    torch.library.define(_name, _schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(_name, "CompositeExplicitAutograd", _kernel)
    torch.library.register_fake(_name, _shape)
torch.library.register_autograd(_ATTEND, _back, setup_context=_keep)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[tokens, heads, dim] -> [groups, heads of a group, tokens, dim], a view if the kernel can read it."""
    x = x if x.stride(-1) == 1 else x.contiguous()  # the kernel assumes a last stride of 1
    return x.view(len(x), groups, -1, x.shape[-1]).permute(1, 2, 0, 3)


def _of_groups(sinks: Tensor, groups: int) -> Tensor:
    """[heads] -> [groups, heads of a group, 1], as the log-sums are."""
    return sinks.view(groups, -1, 1)


def _like(q: Tensor, k: Tensor) -> Tensor:
    """Expand one key-value head per group to one per query head, without a copy."""
    return k.expand(-1, q.shape[1], -1, -1)
