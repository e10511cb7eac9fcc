"""Attention over whole rows by PyTorch's own kernel, with a causal flag or a dense mask.

The mask costs seq x keys bytes and computes what it then hides, so it is the last resort.
"""

from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Causal:
    """Every query sees the keys up to its own; as many keys as queries."""

    def __call__(self, q_bhld: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, scale: float) -> Tensor:
        """Attend."""
        return scaled_dot_product_attention(
            q_bhld, k_bksd, v_bksd, is_causal=True, scale=scale, enable_gqa=_grouped(q_bhld, k_bksd)
        )


@dataclass(frozen=True, slots=True)
class Masked:
    """Queries see the keys where the mask is True."""

    mask: Bool[Tensor, "batch_or_1 1 seq keys"]

    def __call__(self, q_bhld: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, scale: float) -> Tensor:
        """Attend."""
        # repeated, because on CUDA a mask with grouped heads falls back to the unfused kernel
        groups = q_bhld.shape[1] // k_bksd.shape[1]
        k_bhsd, v_bhsd = (t.repeat_interleave(groups, dim=1) for t in (k_bksd, v_bksd))
        return scaled_dot_product_attention(q_bhld, k_bhsd, v_bhsd, attn_mask=self.mask, scale=scale)


def _grouped(q_bhld: Tensor, k_bksd: Tensor) -> bool:
    return q_bhld.shape[1] != k_bksd.shape[1]
