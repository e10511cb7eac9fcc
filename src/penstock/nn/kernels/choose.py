"""Choice of the attention kernel for one forward pass."""

import torch
from torch import Tensor

from penstock.nn.attention import Attend
from penstock.nn.kernels.layout import AttentionLayout, visibility_mask
from penstock.nn.kernels.sdpa import Causal, Masked, by_document
from penstock.nn.kernels.varlen_cpu import per_document
from penstock.nn.kernels.varlen_flash import is_available, var_len


def choose_kernel(
    layout: AttentionLayout, *, device: torch.device, dtype: torch.dtype, head_dim: int
) -> Attend:
    """Return the fastest available kernel that is exact for this layout; called once per forward pass.

    Args:
        device: device of queries and keys.
        dtype: dtype of queries and keys.
    """
    if layout.cu_seqlens is None and not layout.is_windowed:
        return Causal()
    if is_available(device=device, dtype=dtype, head_dim=head_dim):
        return var_len(layout, device=device)
    if device.type == "cpu":
        return per_document(layout)

    def mask() -> Tensor:
        return visibility_mask(layout, device=device)

    like = torch.empty(0, dtype=dtype, device=device)
    return by_document(layout, like=like, mask=mask) or Masked(mask())
