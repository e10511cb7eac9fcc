"""Attention over packed documents by the variable-length flash kernel of PyTorch, on NVIDIA GPUs.

Nothing waits for the device: the kernel reads the documents' ends from device memory, and the row
length serves as the bound on a document's length.
"""

from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int32
from torch import Tensor

from penstock.nn.kernels.layout import Layout

if TYPE_CHECKING:
    import torch.nn.attention.varlen

_NEEDED = {"scale", "window_size", "enable_gqa"}  # the first releases of the function lack them


@dataclass(frozen=True, slots=True)
class VarLen:
    """Causal attention inside each document."""

    cu_seqlens: Int32[Tensor, "documents_plus_1"]
    longest: int
    """Bound on a document's tokens."""
    window: int | None

    def __call__(self, q_bhld: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, scale: float) -> Tensor:
        """Attend."""
        batch, _, seq_len, _ = q_bhld.shape
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q_bhld, k_bksd, v_bksd))
        left = -1 if self.window is None else self.window - 1
        out = torch.nn.attention.varlen.varlen_attn(
            q, k, v, self.cu_seqlens, self.cu_seqlens, self.longest, self.longest,
            scale=scale, window_size=(left, 0), enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        assert isinstance(out, Tensor), type(out)
        return out.view(batch, seq_len, *out.shape[1:]).transpose(1, 2)


def is_available(*, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether this torch, device and type have the kernel."""
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
    """Load the kernel: here, because that takes a second, and CPUs do without."""
    try:
        import torch.nn.attention.varlen as varlen
    except ImportError:  # before torch 2.10
        return False
    return set(signature(varlen.varlen_attn).parameters) >= _NEEDED


def var_len(layout: Layout, *, device: torch.device) -> VarLen:
    """Prepare the kernel; rows are documents when the layout has none."""
    ends = layout.cu_seqlens
    if ends is None:
        ends = torch.arange(0, (layout.batch + 1) * layout.seq_len, layout.seq_len, device=device)
    window = layout.window if layout.is_windowed else None
    return VarLen(ends.to(device=device, dtype=torch.int32), layout.seq_len, window)
