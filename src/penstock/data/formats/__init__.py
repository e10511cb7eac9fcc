"""Readers of token shards, one per on-disk format, behind one protocol.

A shard answers three questions: how many tokens and documents it holds, which documents end
inside a range of its tokens, and what the tokens of a range are: an attribute to slice, so that a memory
map is read without a call in between. To add a format, write a module with
`open_shard(storage, name, options) -> TokenShard` and a row in FORMATS.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.table import Table
from penstock.data.storage import Slices, Storage

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

Options = Mapping[str, str]
"""What a format leaves open and its user says, as in `olmo:/data/part,dtype=uint32`; kept in the manifest."""


class TokenShard(Protocol):
    """One run of tokens, usually one file; positions count from the shard's first token."""

    num_tokens: int
    num_documents: int

    def document_ends(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the ends e of documents with start < e <= stop; repeats are empty documents."""

    @property
    def tokens(self) -> Slices:
        """The tokens, to be sliced: `shard.tokens[start:stop]` is a read-only uint16 or uint32 array."""


class OpenShard(Protocol):
    """What a format's module offers."""

    def __call__(self, storage: Storage, name: str, options: Options) -> TokenShard:
        """Open a shard; reads its header and nothing else.

        Raises:
            CorpusError: the file is missing, truncated, or not of this format.
        """


FORMATS = Table("shard format", {"arrow": "penstock.data.formats.arrow:open_shard"})
