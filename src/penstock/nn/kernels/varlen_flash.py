"""Attention over packed documents by the variable-length flash kernel of PyTorch, on NVIDIA GPUs.

Nothing waits for the device: the kernel reads the ends of documents from device memory, and the row length
is the bound on the length of a document.
"""

from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int32
from torch import Tensor

from penstock.nn.kernels.layout import AttentionLayout

if TYPE_CHECKING:
    import torch.nn.attention.varlen


_NEEDED = {"scale", "window_size"}  # torch 2.10 lacks them
_GROUPS = "enable_gqa"  # missing in some releases that have those


@dataclass(frozen=True, slots=True)
class VarLen:
    """Causal attention inside each document."""

    cu_seqlens: Int32[Tensor, "documents_plus_1"]
    longest: int
    """Upper bound on the tokens of a document."""
    window: int | None
    has_groups: bool = True
    """True if the kernel takes fewer key heads than query heads; otherwise key heads are repeated."""

    def __call__(self, q_bhld: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, scale: float) -> Tensor:
        """Attend within each document; q is [b, h, l, d], k and v are [b, k, l, d]."""
        batch, _, seq_len, _ = q_bhld.shape
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q_bhld, k_bksd, v_bksd))
        options: dict[str, Any] = {_GROUPS: q.shape[1] != k.shape[1]} if self.has_groups else {}
        if not self.has_groups:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        left = -1 if self.window is None else self.window - 1
        out = torch.nn.attention.varlen.varlen_attn(
            q, k, v, self.cu_seqlens, self.cu_seqlens, self.longest, self.longest,
            scale=scale, window_size=(left, 0), **options,
        )  # fmt: skip
        assert isinstance(out, Tensor), type(out)
        return out.view(batch, seq_len, *out.shape[1:]).transpose(1, 2)


def is_available(*, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """True if the kernel exists in this torch release and supports the device, dtype and head dim."""
    return (
        device.type == "cuda"
        and _is_here()
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@cache
def _is_here() -> bool:
    """Import the kernel, which takes a second that CPUs do not spend; True if it has the needed options."""
    try:
        import torch.nn.attention.varlen as varlen
    except ImportError:  # before torch 2.10
        return False
    return set(signature(varlen.varlen_attn).parameters) >= _NEEDED


@cache
def _has_groups() -> bool:
    return _is_here() and _GROUPS in signature(torch.nn.attention.varlen.varlen_attn).parameters


def var_len(layout: AttentionLayout, *, device: torch.device) -> VarLen:
    """Return the kernel; without `cu_seqlens`, each row is a document."""
    ends = layout.cu_seqlens
    if ends is None:
        ends = torch.arange(0, (layout.batch + 1) * layout.seq_len, layout.seq_len, device=device)
    window = layout.window if layout.is_windowed else None
    return VarLen(ends.to(device=device, dtype=torch.int32), layout.seq_len, window, _has_groups())
