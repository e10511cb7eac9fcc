"""Attention kernels of a forward pass without a cache: the candidates by operation, and the choice of one.

An operation is what a layout asks for: whole rows of one document, rows of several documents, or a sliding
window over either. The order of its candidates is the choice where nothing was measured. A candidate is a
function that returns the kernel for a layout, or None where the device or the dtype has no such kernel.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from penstock.devices import accelerator
from penstock.nn.attention import Attend
from penstock.nn.kernels.layout import AttentionLayout, visibility_mask
from penstock.nn.kernels.sdpa import Causal, Masked, by_document
from penstock.nn.kernels.varlen_cpu import per_document
from penstock.nn.kernels.varlen_flash import var_len

ROWS, DOCUMENTS, WINDOW = "attention.rows", "attention.documents", "attention.window"

Make = Callable[..., Attend | None]
"""Takes the arguments of `choose_kernel`, without `kernels`."""


def operation_of(layout: AttentionLayout) -> str:
    """Return the operation that a layout asks for."""
    if layout.is_windowed:
        return WINDOW
    return ROWS if layout.cu_seqlens is None else DOCUMENTS


def choose_kernel(
    layout: AttentionLayout,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    kernels: Mapping[str, str] | None = None,
) -> Attend:
    """Return a kernel that is exact for this layout; called once per forward pass.

    Args:
        device: device of queries and keys.
        dtype: dtype of queries and keys.
        kernels: operation -> name of the candidate to use; None: the first of each.
    """
    operation = operation_of(layout)
    candidates = CANDIDATES[operation]
    chosen = candidates.get((kernels or {}).get(operation, ""), _none)
    for make in (chosen, *candidates.values()):
        if (found := make(layout, device=device, dtype=dtype, head_dim=head_dim)) is not None:
            return found
    raise AssertionError("a mask serves every layout")


def _none(_: AttentionLayout, **of: object) -> None:  # noqa: ARG001
    return None


def _causal(
    _: AttentionLayout,
    *,
    device: torch.device,
    backend: SDPBackend | None = None,
    **of: object,  # noqa: ARG001
) -> Attend | None:
    return Causal(backend) if backend is None or accelerator.is_accelerator(device) else None


def _per_document(layout: AttentionLayout, *, device: torch.device, **of: object) -> Attend | None:  # noqa: ARG001
    return per_document(layout) if device.type == "cpu" else None


def _by_document(
    layout: AttentionLayout,
    *,
    device: torch.device,
    dtype: torch.dtype,
    **of: object,  # noqa: ARG001
) -> Attend | None:
    like = torch.empty(0, dtype=dtype, device=device)
    return by_document(layout, like=like, mask=partial(visibility_mask, layout, device=device))


def _flex(layout: AttentionLayout, **of: Any) -> Attend | None:  # Any: as in `choose_kernel`
    from penstock.nn.kernels.flex import flex  # loads torch's compiler, which takes seconds

    return flex(layout, **of)


def masked(layout: AttentionLayout, *, device: torch.device, **of: object) -> Attend:  # noqa: ARG001
    """Return the kernel of any layout, device and dtype: the reference of the others."""
    return Masked(visibility_mask(layout, device=device))


_PACKED: Mapping[str, Make] = {
    "varlen, grouped heads": partial(var_len, tries_groups=True),
    "varlen": var_len,
    "documents": _per_document,
    "SDPA by document": _by_document,
    "SDPA with a mask": masked,
    "FlexAttention": _flex,
}
COSTLY = frozenset({"FlexAttention"})
"""Candidates that must be compiled; they are never in use unless they were measured on purpose."""

CANDIDATES: Mapping[str, Mapping[str, Make]] = {
    ROWS: {
        "SDPA": _causal,
        "SDPA by cuDNN": partial(_causal, backend=SDPBackend.CUDNN_ATTENTION),
        "SDPA by FlashAttention": partial(_causal, backend=SDPBackend.FLASH_ATTENTION),
        **_PACKED,
    },
    DOCUMENTS: _PACKED,
    WINDOW: _PACKED,
}
"""Operation -> name -> candidate, in the static order."""
