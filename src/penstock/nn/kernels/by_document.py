"""Attention one document at a time by whichever kernel PyTorch takes: for float32 on GPUs.

There the variable-length kernel is not to be had, and a dense mask computes every pair of a row to hide most
of them. A piece is a call of its own, so documents must be long enough to be worth one. In a compiled block
the pieces of each batch would be compiled anew: there, it is the mask after all.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.nn.attention import Attend
from penstock.nn.kernels.layout import Layout
from penstock.nn.kernels.pieces import Piece, pieces

_WORTH_A_CALL = 64  # tokens a piece, on average


@dataclass(frozen=True, slots=True)
class ByDocument:
    """Causal attention inside each document."""

    pieces: tuple[Piece, ...]
    """Of the flattened batch, in order; each query is in one."""
    compiled: Callable[[], Attend]
    """What to call in a compiled block."""

    def __call__(self, q_bhld: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, scale: float) -> Tensor:
        """Attend."""
        if torch.compiler.is_compiling():
            return self.compiled()(q_bhld, k_bksd, v_bksd, scale=scale)
        batch, heads, seq_len, _ = q_bhld.shape
        # repeated, because on CUDA grouped heads fall back to the unfused kernel
        k, v = (t.repeat_interleave(heads // k_bksd.shape[1], dim=1) for t in (k_bksd, v_bksd))
        q, k, v = (t.transpose(0, 1).flatten(1, 2)[None] for t in (q_bhld, k, v))
        parts = [
            scaled_dot_product_attention(
                q[:, :, piece.queries], k[:, :, piece.keys], v[:, :, piece.keys],
                attn_mask=piece.mask, is_causal=piece.mask is None, scale=scale,
            )
            for piece in self.pieces
        ]  # fmt: skip
        out = torch.cat(parts, 2)[0]
        return out.view(heads, batch, seq_len, -1).transpose(0, 1)


def by_document(layout: Layout, *, like: Tensor, compiled: Callable[[], Attend]) -> ByDocument | None:
    """Prepare the kernel; None where pieces are too short for it. Waits for the device once.

    Args:
        layout: rows are documents when it has none.
        like: has the type and the device of queries and keys.
        compiled: returns what serves in compiled blocks.
    """
    tokens, ends = layout.batch * layout.seq_len, layout.cu_seqlens
    if ends is None:
        ends = torch.arange(0, tokens + 1, layout.seq_len)
    window = layout.window if layout.is_windowed else None
    found = tuple(pieces(ends.cpu(), window or 0, like=like))
    return ByDocument(found, compiled) if tokens >= _WORTH_A_CALL * len(found) else None
