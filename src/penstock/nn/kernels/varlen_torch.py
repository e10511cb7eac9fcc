"""torch.nn.attention.varlen_attn on NVIDIA GPUs: whether it is there, and one call for its releases.

Nothing waits for the device: the kernel reads the ends of sequences from device memory.
"""

from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int32
from torch import Tensor

if TYPE_CHECKING:
    import torch.nn.attention.varlen


_NEEDED = {"scale", "window_size"}  # torch 2.10 lacks them
_GROUPS, _PAGES = "enable_gqa", "block_table"  # missing in some releases that have those


def is_available(*, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """True if the kernel exists in this torch release and supports the device, dtype and head dim."""
    return (
        device.type == "cuda"
        and parameters() >= _NEEDED
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def has_groups() -> bool:
    """True if grouped heads are a documented option; without it some releases take them, others do not."""
    return _GROUPS in parameters()


def has_pages() -> bool:
    """True if keys and values may lie in pages; which sizes of pages depends on the library below."""
    return _PAGES in parameters()


@cache
def parameters() -> frozenset[str]:
    """Return the options of the kernel; empty before torch 2.10. The import takes a second."""
    try:
        import torch.nn.attention.varlen as varlen
    except ImportError:
        return frozenset()
    return frozenset(signature(varlen.varlen_attn).parameters)


def attend_varlen(
    q_thd: Tensor,
    k_skd: Tensor,
    v_skd: Tensor,
    q_ends: Int32[Tensor, "sequences_plus_1"],
    k_ends: Int32[Tensor, "sequences_plus_1"] | None,
    *,
    longest: tuple[int, int],
    window: int | None,
    scale: float,
    repeats: bool = False,
    **pages: Any,  # Any: of the kernel
) -> Tensor:
    """Attend causally, the last query of a sequence to its last key; returns [t, h, d].

    Args:
        k_ends: None: keys and values lie in `pages`.
        longest: upper bounds on the queries and on the keys of a sequence.
        window: as in `AttentionLayout`.
        repeats: repeat key heads, one for each query head; False: the kernel takes grouped heads.
    """
    options: dict[str, Any] = (
        {_GROUPS: not repeats and q_thd.shape[1] != k_skd.shape[-2]} if has_groups() else {}
    )
    if repeats:
        k_skd, v_skd = (t.repeat_interleave(q_thd.shape[1] // t.shape[1], dim=1) for t in (k_skd, v_skd))
    left = -1 if window is None else window - 1
    out = torch.nn.attention.varlen.varlen_attn(
        q_thd,
        k_skd,
        v_skd,
        q_ends,
        k_ends,
        longest[0],
        longest[1],
        scale=scale,
        window_size=(left, 0),
        **options,
        **pages,
    )
    assert isinstance(out, Tensor), type(out)
    return out
