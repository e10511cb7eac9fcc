"""Readers of token shards: a table of formats, each a few functions behind one protocol.

A shard answers three questions: how many tokens and documents it holds, which documents end
inside a range of its tokens, and what the tokens of a range are: an attribute to slice, so that a memory
map is read without a call in between. To add a format, write a module with a `Format`, and a row below; one
whose tokens lie end to end in a file is a row of flat_layouts.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.core.arrays import Int64
from penstock.core.table import Table
from penstock.storage.base import Slices, Storage, probe

Options = Mapping[str, str]
"""Options of a format that its files do not say, as in `olmo:/data/part,dtype=uint32`; in the manifest."""


class TokenShard(Protocol):
    """One run of tokens, usually one file; positions count from the shard's first token."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the shard."""

    @property
    def num_documents(self) -> int:
        """Documents, empty ones too."""

    def document_ends(self, start: int, stop: int) -> Int64:
        """Return the ends e of documents with start < e <= stop; repeats are empty documents."""

    @property
    def tokens(self) -> Slices:
        """The tokens, to be sliced: `shard.tokens[start:stop]` is a read-only uint16 or uint32 array."""


EndsBetween = Callable[[int, int], Int64]
"""(start, stop) -> the ends e of documents with start < e <= stop."""


@dataclass(frozen=True, slots=True)
class StoredShard:
    """Shard that a format opens: a `TokenShard`, and what its reader knows besides."""

    tokens: Slices
    num_documents: int
    document_ends: EndsBetween
    largest_id: int = -1
    """-1 where it is not known."""
    recheck: Callable[[], Iterator[str]] = lambda: iter(())
    """Yields what is wrong in the files and is not looked at when they are opened."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the shard."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Functions that find and open the shards of a format."""

    open_shard: Callable[[Storage, str, Options], StoredShard]
    """(storage, name, options) -> the shard; reads its header and nothing else.

    Raises CorpusError where the file is missing, truncated, or not of this format, and UsageError where an
    option is missing or wrong.
    """
    find: Callable[[Mapping[str, int]], list[str]] = lambda _sizes: []
    """Files by size -> the names of the shards among them, in token order. It looks at names alone, and
    names shards too that another file tells of and that are missing; none where the files are of another
    format."""
    companions: Callable[[str], tuple[str, ...]] = lambda _name: ()
    """Shard -> the names of the files that belong to it beside its own, whether or not they are there."""
    indices: Callable[[str], tuple[str, ...]] = lambda _name: ()
    """Shard -> the names under which a file that lists it may be."""
    missing: Callable[[Storage, Mapping[str, int], Sequence[str]], Iterator[str]] = (
        lambda _storage, _sizes, _shards: iter(())
    )
    """(storage, files by size, shards) -> the names that indices of the shards, or numbers in their names,
    tell of and that are missing."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Option -> what it says, for messages."""


FORMATS: Mapping[str, Format] = Table(
    "shard format",
    {
        "arrow": "penstock.data.formats.arrow:ARROW",
        "datatrove": "penstock.data.formats.flat_layouts:DATATROVE",
        "fms": "penstock.data.formats.arrow_folders:FMS",
        "hf": "penstock.data.formats.arrow_folders:HF",
        "mds": "penstock.data.formats.mds:MDS",
        "megatron": "penstock.data.formats.flat_layouts:MEGATRON",
        "nanogpt": "penstock.data.formats.flat_layouts:NANOGPT",
        "olmo": "penstock.data.formats.flat_layouts:OLMO",
        "parquet": "penstock.data.formats.parquet:PARQUET",
        "synthetic": "penstock.data.corpus.synthetic:FORMAT",
    },
)
"""By the word that stands before the path in a spec; a reader is imported when its row is looked up."""


def probe_of(format: str, storage: Storage, name: str) -> str:  # noqa: A002
    """Return the probe of a shard and the files that belong to it; see storage/base.py."""
    return probe(storage, name, FORMATS[format].companions(name))
