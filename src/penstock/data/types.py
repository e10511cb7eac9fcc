"""Types of the loader: fragments of documents, pieces of rows, batches; row checksums for logs.

    token range --fragments--> Fragments --packing--> Pieces --pool--> rows --loader--> Batch

Positions are int64 everywhere: a corpus may have 10^14 tokens.
"""

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.core.arrays import Bool, Int32, Int64

IGNORED_LABEL = -100
"""Label of a position that is not trained on; the default ignore_index of torch's cross entropy."""
PADDING = -1
"""Shard index of a padding piece."""


@dataclass(frozen=True, slots=True)
class Fragments:
    """Token ranges within single documents, in corpus order; all arrays are [n]."""

    shards: Int64
    """Index of the shard."""
    starts: Int64
    """First token, as a position in the corpus."""
    lengths: Int64
    """Number of tokens, at least 1."""
    continued: Bool
    """True if the document continues after the fragment."""

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, indices: Int64) -> "Fragments":
        """Return the fragments at the given indices."""
        return Fragments(
            self.shards[indices], self.starts[indices], self.lengths[indices], self.continued[indices]
        )


@dataclass(frozen=True, slots=True)
class Pieces:
    """Placement of fragments into rows: pieces in row order; piece arrays are [p]."""

    fragment: Int64
    """Index of the fragment a piece is cut from."""
    offset: Int64
    """First token of the piece, counted from the start of its fragment."""
    length: Int64
    """Number of tokens, at least 1."""
    row_ends: Int64
    """[num_rows] number of pieces up to and including each row."""


@dataclass(frozen=True, slots=True)
class Waste:
    """Padding positions of rows, and tokens that were left out."""

    padding: int = 0
    """Positions without a token."""
    left_out: int = 0
    """Tokens of truncated or dropped documents that no row holds."""
    documents: int = 0
    """Documents that those tokens belong to."""

    def __add__(self, other: "Waste") -> "Waste":
        return Waste(
            self.padding + other.padding, self.left_out + other.left_out, self.documents + other.documents
        )

    def __sub__(self, other: "Waste") -> "Waste":
        return self + other * -1

    def __mul__(self, times: int) -> "Waste":
        return Waste(times * self.padding, times * self.left_out, times * self.documents)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one rank in one step: B rows of L tokens."""

    fields: dict[str, Int64 | Int32]
    """`sample_ids` [B] int64 always; if requested `input_ids`, `labels`, `position_ids`, `document_ids`
    [B, L] int64 or int32 and `cu_seqlens` [documents + 1] int32 over the flattened batch."""


MAX_SAMPLES = 2**62
"""Largest sample id plus one; sample arithmetic is int64."""

MAX_LENGTH = 2**30
"""Largest sequence length: a row must fit in memory, and the tokens of a pool in int64."""

MAX_ROWS = 2**22
"""Largest batch in rows: the samples of any number of steps must fit in int64."""


def checksums(input_ids: npt.NDArray[np.int64]) -> list[int]:
    """Return the CRC-32 of each row of `input_ids` [rows, length].

    >>> checksums(np.array([[1, 2], [1, 3]]))
    [16178617, 3428637991]
    """
    return [zlib.crc32(row.tobytes()) for row in input_ids]
