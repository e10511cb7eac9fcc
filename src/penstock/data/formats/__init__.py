"""Readers of token shards, one per on-disk format, behind one protocol.

A shard answers three questions: how many tokens and documents it holds, which documents end
inside a range of its tokens, and what the tokens of a range are: an attribute to slice, so that a memory
map is read without a call in between. To add a format, write a module
with `open_shard(path) -> TokenShard` and a row in FORMATS.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.table import Table

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class Slices(Protocol):
    """What can be sliced like an array: a memory map, or a reader that fetches."""

    def __getitem__(self, part: slice, /) -> Tokens:
        """Return tokens [start, stop); the array lives as long as anyone holds it."""


class TokenShard(Protocol):
    """One file of tokens; positions count from the shard's first token."""

    num_tokens: int
    num_documents: int

    def document_ends(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the ends e of documents with start < e <= stop; repeats are empty documents."""

    @property
    def tokens(self) -> Slices:
        """The shard's tokens, to be sliced: `shard.tokens[start:stop]` is a read-only array."""


FORMATS = Table("shard format", {"arrow": "penstock.data.formats.arrow:open_shard"})
