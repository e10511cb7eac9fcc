"""Readers of token shards, one per on-disk format, behind one protocol.

A shard answers three questions: how many tokens and documents it holds, which documents end
inside a range of its tokens, and what the tokens of a range are: an attribute to slice, so that a memory
map is read without a call in between. To add a format, write a module with these, and a row below:

- `open_shard(storage, name, options) -> TokenShard`
- `find(sizes) -> list[str]`: the shards among files of these names and sizes, in token order; none where
  the files are of another format. It looks at names alone.
- `companions(name) -> tuple[str, ...]`: files that belong to a shard beside the one it is named for,
  whether or not they are there.
- `OPTIONS`: option -> what it says, for messages.
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

    @property
    def num_documents(self) -> int:
        """Documents, empty ones too."""

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


class Find(Protocol):
    """Tells the shards of a format among the files of a folder."""

    def __call__(self, sizes: Mapping[str, int]) -> list[str]:
        """Return the names of the shards, in token order; empty where there are none."""


class Companions(Protocol):
    """Names the further files of a shard."""

    def __call__(self, name: str) -> tuple[str, ...]:
        """Return the names of the files that belong to a shard beside its own."""


_MODULES = {
    "arrow": "penstock.data.formats.arrow",
    "datatrove": "penstock.data.formats.datatrove",
    "fms": "penstock.data.formats.fms",
    "hf": "penstock.data.formats.hf_datasets",
    "mds": "penstock.data.formats.mds",
    "megatron": "penstock.data.formats.megatron",
    "nanogpt": "penstock.data.formats.nanogpt",
    "olmo": "penstock.data.formats.olmo",
    "parquet": "penstock.data.formats.parquet",
    "synthetic": "penstock.data.formats.synthetic",
}
_FOREIGN = {name: module for name, module in _MODULES.items() if name != "arrow"}  # that has a manifest

FORMATS = Table("shard format", {name: f"{module}:open_shard" for name, module in _MODULES.items()})
FINDERS = Table("shard format", {name: f"{module}:find" for name, module in _FOREIGN.items()})
COMPANIONS = Table("shard format", {name: f"{module}:companions" for name, module in _FOREIGN.items()})
OPTIONS = Table("shard format", {name: f"{module}:OPTIONS" for name, module in _FOREIGN.items()})
"""Of each foreign format: option -> what it says."""
