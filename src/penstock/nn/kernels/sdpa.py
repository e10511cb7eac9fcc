"""Attention by PyTorch's scaled_dot_product_attention: causal, document by document, or masked.

`ByDocument` serves GPUs without the variable-length kernel: a dense mask would compute every pair of a row
and hide most of them. Each chunk is a call of its own, so documents must be long enough to be worth one. In a
compiled block the chunks of each batch would be compiled anew, so the mask is used there.

The mask takes seq x keys bytes and computes scores that it hides, so it is the last resort. It alone takes
attention sinks, which it computes by the formula, because scaled_dot_product_attention returns no log-sums.
Then the scores take memory too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from penstock.nn.kernels.layout import AttentionChunk, AttentionLayout, pieces
from penstock.nn.kernels.written_out import attend_written_out

_WORTH_A_CALL = 64  # average tokens of a chunk


@dataclass(frozen=True, slots=True)
class ByDocument:
    """Causal attention inside each document."""

    pieces: tuple[AttentionChunk, ...]
    """Chunks of the flattened batch, in order; each query is in one."""
    mask: Callable[[], Bool[Tensor, "batch_or_1 1 seq keys"]]
    """Returns the dense mask, for compiled blocks."""

    def __call__(self, q_bhld: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, scale: float) -> Tensor:
        """Attend within each chunk; q is [b, h, l, d], k and v are [b, k, l, d]."""
        if torch.compiler.is_compiling():
            return _attend_masked(q_bhld, k_bksd, v_bksd, self.mask(), scale=scale)
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


def by_document(
    layout: AttentionLayout, *, like: Tensor, mask: Callable[[], Bool[Tensor, "batch_or_1 1 seq keys"]]
) -> ByDocument | None:
    """Return the kernel, or None if the chunks are too short for it. Waits for the device once.

    Args:
        layout: without `cu_seqlens`, each row is a document.
        like: a tensor with the dtype and the device of queries and keys.
        mask: returns the dense mask of the layout, for compiled blocks.
    """
    tokens, ends = layout.batch * layout.seq_len, layout.cu_seqlens
    if ends is None:
        ends = torch.arange(0, tokens + 1, layout.seq_len)
    window = layout.window if layout.is_windowed else None
    found = tuple(pieces(ends.cpu(), window or 0, like=like))
    return ByDocument(found, mask) if tokens >= _WORTH_A_CALL * len(found) else None


@dataclass(frozen=True, slots=True)
class Causal:
    """Causal attention; as many keys as queries."""

    backend: SDPBackend | None = None
    """Library that computes it, which raises where it cannot; None: as torch chooses."""

    def __call__(self, q_bhld: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, scale: float) -> Tensor:
        """Attend causally; q is [b, h, l, d], k and v are [b, k, l, d]."""
        if self.backend is None:
            return _causal(q_bhld, k_bksd, v_bksd, scale)
        with sdpa_kernel(self.backend):
            return _causal(q_bhld, k_bksd, v_bksd, scale)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=_grouped(q, k))


@dataclass(frozen=True, slots=True)
class Masked:
    """Attention under a dense mask: queries see the keys where it is True."""

    mask: Bool[Tensor, "batch_or_1 1 seq keys"]

    def __call__(
        self, q_bhld: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend under the mask; q is [b, h, l, d], k and v are [b, k, s, d], sinks [h]."""
        return _attend_masked(q_bhld, k_bksd, v_bksd, self.mask, scale=scale, sinks=sinks)


def _attend_masked(
    q_bhld: Tensor,
    k_bksd: Tensor,
    v_bksd: Tensor,
    mask: Tensor,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    # repeated, because on CUDA a mask with grouped heads falls back to the unfused kernel
    groups = q_bhld.shape[1] // k_bksd.shape[1]
    k_bhsd, v_bhsd = (t.repeat_interleave(groups, dim=1) for t in (k_bksd, v_bksd))
    if sinks is not None:
        return attend_written_out(q_bhld, k_bhsd, v_bhsd, mask, scale=scale, sinks=sinks)
    return scaled_dot_product_attention(q_bhld, k_bhsd, v_bhsd, attn_mask=mask, scale=scale)


def _grouped(q_bhld: Tensor, k_bksd: Tensor) -> bool:
    return q_bhld.shape[1] != k_bksd.shape[1]
