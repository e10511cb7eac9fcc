"""datatrove's tokens, which nanotron trains on: `.ds` with `.ds.index`, and `.ds.metadata` if it was kept.

The tokens are uint16 or uint32 without any header; the index holds the end of each document as uint64;
the metadata's first line ends in the bytes of a token
(github.com/huggingface/datatrove, datatrove/pipeline/tokens/tokenizer.py).
"""

from collections.abc import Mapping

from penstock.core.errors import CorpusError
from penstock.data.formats import Options
from penstock.data.formats.index import DocumentEnds
from penstock.data.formats.stored import whole_items
from penstock.data.storage import Absent, Blob, Slices, Storage

OPTIONS: Mapping[str, str] = {}

_METADATA_BYTES = 2**16


class DatatroveShard:
    """One `.ds` file, read in place."""

    def __init__(self, tokens: Slices, ends: DocumentEnds) -> None:
        self.tokens = tokens
        self.num_tokens = len(tokens)
        self.num_documents = len(ends)
        self.document_ends = ends.between


def open_shard(storage: Storage, name: str, options: Options) -> DatatroveShard:  # noqa: ARG001
    """Open a file of tokens with its index.

    Raises:
        CorpusError: one of them is missing, or they do not fit together.
    """
    blob = storage.open(name)
    index = storage.open(f"{name}.index")
    count = whole_items(index.size, "uint64", name=index.name)
    ends = index.array("<i8", offset=0, count=count)  # uint64 of 2**63 would be no position either
    num_tokens = int(ends[count - 1 : count][0]) if count else 0
    size = _token_bytes(storage, name) or (4 if blob.size == 4 * num_tokens != 0 else 2)
    if blob.size != size * num_tokens:
        raise CorpusError(
            f"{blob.name} has {blob.size:,} bytes, its index ends at token {num_tokens:,}",
            fix="One of them is truncated or belongs to another: restore them or make them again.",
        )
    tokens = blob.array(f"<u{size}", offset=0, count=num_tokens)
    return DatatroveShard(tokens, DocumentEnds(ends, num_tokens=num_tokens, name=index.name))


def find(sizes: Mapping[str, int]) -> list[str]:
    """Return the `.ds` files."""
    return [name for name in sizes if name.endswith(".ds")]


def companions(name: str) -> tuple[str, ...]:
    """Return the names of a file's index and metadata."""
    return f"{name}.index", f"{name}.metadata"


def _token_bytes(storage: Storage, name: str) -> int | None:
    """Return the bytes of a token as the metadata says them; None where it does not."""
    try:
        metadata: Blob = storage.open(f"{name}.metadata")
    except Absent:
        return None
    first = metadata.read(0, min(metadata.size, _METADATA_BYTES)).split(b"\n", 1)[0]
    _, _, size = first.rpartition(b"|")
    return int(size) if size in (b"2", b"4") else None
