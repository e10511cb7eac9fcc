"""Attention over packed documents by the variable-length kernel of PyTorch, on NVIDIA GPUs.

The row length is the bound on the length of a document.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int32
from torch import Tensor

from penstock.nn.kernels.layout import AttentionLayout
from penstock.nn.kernels.varlen_torch import attend_varlen, has_groups, has_log_sums, is_available


@dataclass(frozen=True, slots=True)
class VarLen:
    """Causal attention inside each document."""

    cu_seqlens: Int32[Tensor, "documents_plus_1"]
    longest: int
    """Upper bound on the tokens of a document."""
    window: int | None
    repeats: bool = False
    """True if key heads are repeated, one for each query head; False: the kernel takes grouped heads."""

    def __call__(
        self, q_bhld: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend within each document; q is [b, h, l, d], k and v are [b, k, l, d], sinks [h]."""
        batch, _, seq_len, _ = q_bhld.shape
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q_bhld, k_bksd, v_bksd))
        longest, ends = (self.longest, self.longest), self.cu_seqlens
        out = attend_varlen(
            q, k, v, ends, ends,
            longest=longest, window=self.window, scale=scale, repeats=self.repeats, sinks=sinks,
        )  # fmt: skip
        return out.view(batch, seq_len, *out.shape[1:]).transpose(1, 2)


def var_len(
    layout: AttentionLayout,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    has_sinks: bool = False,
    tries_groups: bool = False,
) -> VarLen | None:
    """Return the kernel; without `cu_seqlens`, each row is a document. None: the device has no such kernel.

    Args:
        has_sinks: the kernel is for layers with attention sinks.
        tries_groups: give grouped heads to a release that does not document them. Where they are documented
            they are always given, and None is returned.
    """
    if not is_available(device=device, dtype=dtype, head_dim=head_dim) or (tries_groups and has_groups()):
        return None
    if has_sinks and not has_log_sums():
        return None
    ends = layout.cu_seqlens
    if ends is None:
        ends = torch.arange(0, (layout.batch + 1) * layout.seq_len, layout.seq_len, device=device)
    window = layout.window if layout.is_windowed else None
    repeats = not (tries_groups or has_groups())
    return VarLen(ends.to(device=device, dtype=torch.int32), layout.seq_len, window, repeats)
