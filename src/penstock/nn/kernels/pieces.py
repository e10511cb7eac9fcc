"""Cut packed rows into pieces of attention that share no work.

A piece is a document or, under a sliding window, a run of its queries with the keys they can see.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

_RUN = 256  # queries of a windowed piece: fewer waste less beyond the window, more use the cores better


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries and the keys that any of them sees, as slices of the tokens."""

    queries: slice
    keys: slice
    mask: Tensor | None
    """[queries, keys] to add to the scores; None: causal, as many keys as queries."""


def pieces(ends: Tensor, window: int, *, like: Tensor) -> Iterator[Piece]:
    """Cut documents into pieces; every query is in one.

    Args:
        ends: of documents over the flattened batch, from 0.
        window: as in Layout; 0: none.
        like: has the type and the device of masks.
    """
    edges = torch.unique_consecutive(ends).tolist()
    for first, past in pairwise(edges):
        run = _RUN if window and past - first > window else past - first
        for start in range(first, past, run):
            stop = min(start + run, past)
            if not window or stop - first <= min(window, run):  # the start of a document
                yield Piece(slice(start, stop), slice(start, stop), None)
                continue
            since = max(first, start - window + 1)
            unseen = window - 1 - (start - since)  # columns of the mask before the document's start
            mask = _band(window, run, like.dtype, like.device)[: stop - start, unseen : unseen + stop - since]
            yield Piece(slice(start, stop), slice(since, stop), mask)


@lru_cache(maxsize=4)
def _band(window: int, run: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask of `run` queries, the first of which has `window - 1` keys before its own."""
    own = torch.arange(run, device=device)[:, None] + window - 1
    keys = torch.arange(run + window - 1, device=device)
    return torch.zeros(run, len(keys), dtype=dtype, device=device).masked_fill_(
        (keys > own) | (keys <= own - window), -torch.inf
    )
