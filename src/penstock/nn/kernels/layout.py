"""What the queries of one forward pass may see, and the plain mask that says so.

The mask is the reference for every kernel: slow, obvious, and what the tests compare with.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Int32
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Shape and visibility of the queries; as many keys."""

    batch: int
    """Rows."""
    seq_len: int
    """Queries per row."""
    window: int | None = None
    """A query sees itself and the `window - 1` positions before it; None: all."""
    cu_seqlens: Int32[Tensor, "documents_plus_1"] | None = None
    """Ends of documents over the flattened batch, from 0; a row's end is always among them."""

    @property
    def is_windowed(self) -> bool:
        """Whether the window hides anything."""
        return self.window is not None and self.window < self.seq_len


def starts_of(cu_seqlens: Int32[Tensor, "documents_plus_1"], num_tokens: int) -> Int[Tensor, "num_tokens"]:
    """Return, for each token of the flattened batch, the index of its document's first token.

    >>> starts_of(torch.tensor([0, 2, 5], dtype=torch.int32), 5).tolist()
    [0, 0, 2, 2, 2]
    """
    index = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens, index, right=True) - 1
    return cu_seqlens[document].long()


def visibility_mask(layout: Layout, *, device: torch.device) -> Bool[Tensor, "batch_or_1 1 seq keys"]:
    """Return the dense mask, True where a query may see a key; batch is 1 when rows are alike."""
    keys = torch.arange(layout.seq_len, device=device)
    queries = keys[:, None]
    mask = keys <= queries
    if layout.window is not None:
        mask = mask & (keys > queries - layout.window)
    if layout.cu_seqlens is None:
        return mask[None, None]
    start = starts_of(layout.cu_seqlens.to(device), layout.batch * layout.seq_len)
    start = start.view(layout.batch, 1, layout.seq_len)
    return (mask & (start.transpose(1, 2) == start))[:, None]
