"""Attention layout: the positions that the queries of a forward pass see, as a mask and as chunks.

The dense mask is the reference for every kernel: slow, obvious, and used by the tests.

`pieces` cuts packed rows into chunks of attention that share no work. A chunk is a document or, under a
sliding window, a run of its queries with the keys that they see.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from jaxtyping import Bool, Int, Int32
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayout:
    """Shape and visibility of the queries; there are as many keys."""

    batch: int
    """Number of rows."""
    seq_len: int
    """Queries per row."""
    window: int | None = None
    """A query sees itself and the `window - 1` positions before it; None: all."""
    cu_seqlens: Int32[Tensor, "documents_plus_1"] | None = None
    """Ends of documents over the flattened batch, from 0; a row's end is always among them."""

    @property
    def is_windowed(self) -> bool:
        """True if the window hides any position."""
        return self.window is not None and self.window < self.seq_len


def starts_of(cu_seqlens: Int32[Tensor, "documents_plus_1"], num_tokens: int) -> Int[Tensor, "num_tokens"]:
    """Return, for each token of the flattened batch, the index of its document's first token.

    >>> starts_of(torch.tensor([0, 2, 5], dtype=torch.int32), 5).tolist()
    [0, 0, 2, 2, 2]
    """
    index = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens, index, right=True) - 1
    return cu_seqlens[document].long()


def visibility_mask(
    layout: AttentionLayout, *, device: torch.device
) -> Bool[Tensor, "batch_or_1 1 seq keys"]:
    """Return the dense mask, True where a query sees a key; batch is 1 if all rows have the same mask."""
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


_RUN = 256  # queries of a windowed chunk: fewer waste less beyond the window, more use the cores better


@dataclass(frozen=True, slots=True)
class AttentionChunk:
    """Queries, and the keys that any of them sees, as slices of the tokens."""

    queries: slice
    keys: slice
    mask: Tensor | None
    """[queries, keys] to add to the scores. None: causal, as many keys as queries."""


def pieces(ends: Tensor, window: int, *, like: Tensor) -> Iterator[AttentionChunk]:
    """Yield the chunks of packed documents; every query is in one chunk.

    Args:
        ends: ends of documents over the flattened batch, from 0.
        window: as in `AttentionLayout`; 0: none.
        like: a tensor with the dtype and the device of the masks.
    """
    edges = torch.unique_consecutive(ends).tolist()
    for first, past in pairwise(edges):
        run = _RUN if window and past - first > window else past - first
        for start in range(first, past, run):
            stop = min(start + run, past)
            if not window or stop - first <= min(window, run):  # the start of a document
                yield AttentionChunk(slice(start, stop), slice(start, stop), None)
                continue
            since = max(first, start - window + 1)
            unseen = window - 1 - (start - since)  # columns of the mask before the document's start
            mask = _band(window, run, like.dtype, like.device)[: stop - start, unseen : unseen + stop - since]
            yield AttentionChunk(slice(start, stop), slice(since, stop), mask)


@lru_cache(maxsize=4)
def _band(window: int, run: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask of `run` queries; the first has `window - 1` keys before its own."""
    own = torch.arange(run, device=device)[:, None] + window - 1
    keys = torch.arange(run + window - 1, device=device)
    return torch.zeros(run, len(keys), dtype=dtype, device=device).masked_fill_(
        (keys > own) | (keys <= own - window), -torch.inf
    )
