"""Attention over packed documents by PyTorch's FlexAttention, which is compiled, on NVIDIA GPUs.

The blocks of the mask are found once per forward pass, from the ends of the documents.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from penstock.nn.kernels.layout import AttentionLayout, starts_of
from penstock.nn.triton_support import has_triton


@dataclass(frozen=True, slots=True)
class Flex:
    """Causal attention inside each document."""

    mask: BlockMask

    def __call__(self, q_bhld: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, scale: float) -> Tensor:
        """Attend within each document; q is [b, h, l, d], k and v are [b, k, l, d]."""
        attend = flex_attention if torch.compiler.is_compiling() else _compiled()
        is_grouped = q_bhld.shape[1] != k_bksd.shape[1]
        out: Tensor = attend(q_bhld, k_bksd, v_bksd, block_mask=self.mask, scale=scale, enable_gqa=is_grouped)
        return out


def flex(layout: AttentionLayout, *, device: torch.device, **of: object) -> Flex | None:  # noqa: ARG001
    """Return the kernel; without `cu_seqlens`, each row is a document. None: the device lacks it."""
    if not has_triton(device):
        return None
    batch, length, window = layout.batch, layout.seq_len, layout.window or layout.seq_len
    ends = layout.cu_seqlens
    if ends is None:
        ends = torch.arange(0, batch * length + 1, length, device=device, dtype=torch.int32)
    starts = starts_of(ends.to(device), batch * length).view(batch, length)

    def sees(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - window) & (starts[row, query] == starts[row, key])

    return Flex(create_block_mask(sees, batch, None, length, length, device=str(device)))


@cache
def _compiled() -> Any:  # Any: what torch.compile returns
    return torch.compile(flex_attention, dynamic=False)
