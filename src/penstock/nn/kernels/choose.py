"""Attention kernels of a forward pass without a cache: the candidates by operation, and the choice of one.

An operation is what a layout asks for: whole rows of one document, rows of several documents, or a sliding
window over either. The order of its candidates is the choice where nothing was measured.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from penstock.devices import accelerator
from penstock.nn.attention import Attend
from penstock.nn.kernels.layout import AttentionLayout, visibility_mask
from penstock.nn.kernels.sdpa import ByDocument, Causal, Masked, by_document
from penstock.nn.kernels.softcap import with_softcap
from penstock.nn.kernels.varlen_cpu import per_document
from penstock.nn.kernels.varlen_flash import var_len

if TYPE_CHECKING:
    from penstock.nn.kernels.flex import Flex

ROWS, DOCUMENTS, WINDOW = "attention.rows", "attention.documents", "attention.window"

Candidate = Callable[[AttentionLayout, Tensor], Attend | None]
"""Returns the kernel of a layout for queries and keys with the dtype, device and last dimension of a tensor;
None: the device or the dtype has no such kernel."""


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
    has_sinks: bool = False,
    kernels: Mapping[str, str] | None = None,
    has_softcap: bool = False,
) -> Attend:
    """Return a kernel that is exact for this layout; called once per forward pass.

    Args:
        device: device of queries and keys.
        dtype: dtype of queries and keys.
        has_sinks: the layers have attention sinks.
        kernels: operation -> name of the candidate to use; None: the first of each.
        has_softcap: scores have a softcap, which one kernel alone computes.
    """
    if has_softcap:
        return cast(Attend, with_softcap(layout))
    like = torch.empty(0, head_dim, dtype=dtype, device=device)
    operation = operation_of(layout)
    candidates = candidates_of(operation, has_sinks=has_sinks)
    chosen = (kernels or {}).get(operation)
    for make in (*(candidates[name] for name in candidates if name == chosen), *candidates.values()):
        if (found := make(layout, like)) is not None:
            return found
    raise AssertionError("a mask serves every layout")


def candidates_of(operation: str, *, has_sinks: bool) -> Mapping[str, Candidate]:
    """Return the candidates of an operation, by name in the static order.

    >>> list(candidates_of(ROWS, has_sinks=True))
    ['varlen, grouped heads', 'varlen', 'documents', 'SDPA with a mask']
    """
    return _WITH_SINKS if has_sinks else CANDIDATES[operation]


def _causal(_: AttentionLayout, like: Tensor, *, backend: SDPBackend | None = None) -> Attend | None:
    is_here = backend is None or accelerator.is_accelerator(like.device)
    return _without_sinks(Causal(backend) if is_here else None)


def _var_len(
    layout: AttentionLayout, like: Tensor, *, tries_groups: bool = False, has_sinks: bool = False
) -> Attend | None:
    device, dtype, head_dim = like.device, like.dtype, like.shape[-1]
    return var_len(
        layout, device=device, dtype=dtype, head_dim=head_dim, has_sinks=has_sinks, tries_groups=tries_groups
    )


def _per_document(layout: AttentionLayout, like: Tensor) -> Attend | None:
    return per_document(layout) if like.device.type == "cpu" else None


def _by_document(layout: AttentionLayout, like: Tensor) -> Attend | None:
    mask = partial(visibility_mask, layout, device=like.device)
    return _without_sinks(by_document(layout, like=like, mask=mask))


def _flex(layout: AttentionLayout, like: Tensor) -> Attend | None:
    from penstock.nn.kernels.flex import flex  # loads torch's compiler, which takes seconds

    return _without_sinks(flex(layout, device=like.device))


def _without_sinks(kernel: "Causal | ByDocument | Flex | None") -> Attend | None:
    """Return a kernel that lacks the argument of sinks, for layers that give none."""
    return cast(Attend | None, kernel)


def masked(layout: AttentionLayout, like: Tensor) -> Attend:
    """Return the kernel of any layout, device and dtype: the reference of the others."""
    return Masked(visibility_mask(layout, device=like.device))


_PACKED: Mapping[str, Candidate] = {
    "varlen, grouped heads": partial(_var_len, tries_groups=True),
    "varlen": _var_len,
    "documents": _per_document,
    "SDPA by document": _by_document,
    "SDPA with a mask": masked,
    "FlexAttention": _flex,
}
_WITH_SINKS: Mapping[str, Candidate] = {
    "varlen, grouped heads": partial(_var_len, tries_groups=True, has_sinks=True),
    "varlen": partial(_var_len, has_sinks=True),
    "documents": _per_document,
    "SDPA with a mask": masked,
}
"""Candidates of every operation of layers with attention sinks: their kernels return log-sums, or they
compute by the formula."""

COSTLY = frozenset({"FlexAttention"})
"""Candidates that must be compiled; they are never in use unless they were measured on purpose."""

CANDIDATES: Mapping[str, Mapping[str, Candidate]] = {
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
