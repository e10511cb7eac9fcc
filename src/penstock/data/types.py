"""What flows through the loader: fragments of documents, packed pools, batches.

    token range --fragments--> Fragments --packing--> Pieces --pool--> rows --loader--> Batch

Positions are int64 everywhere: a corpus may hold 10^14 tokens.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]
Table = Int32 | Int64
"""Pieces [p, 4], as a PackedPool has them."""

IGNORED_LABEL = -100
"""Label of a position that is not trained on; torch's cross entropy ignores it by default."""


@dataclass(frozen=True, slots=True)
class Fragments:
    """Runs of tokens that each lie in one document, in corpus order; all arrays are [n]."""

    shards: Int64
    """Index of the shard."""
    starts: Int64
    """First token, as a position in the corpus."""
    lengths: Int64
    """Tokens, at least 1."""
    continued: Bool
    """Whether the document goes on after the fragment."""

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, indices: Int64) -> "Fragments":
        """Return the fragments at some indices."""
        return Fragments(
            self.shards[indices], self.starts[indices], self.lengths[indices], self.continued[indices]
        )


@dataclass(frozen=True, slots=True)
class Pieces:
    """Where a packing rule put the fragments: pieces in row order; piece arrays are [p]."""

    fragment: Int64
    """Index of the fragment a piece is cut from."""
    offset: Int64
    """First token of the piece, counted from the start of its fragment."""
    length: Int64
    """Tokens, at least 1."""
    row_ends: Int64
    """[num_rows] number of pieces in rows up to and including each row."""


@dataclass(frozen=True, slots=True)
class Waste:
    """What rows do not hold: positions without a token, and tokens that no row has."""

    padding: int = 0
    """Positions that hold no token."""
    left_out: int = 0
    """Tokens that were truncated or dropped."""
    documents: int = 0
    """Documents that they were taken from."""

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
    """Rows for one rank; B rows of L tokens."""

    fields: dict[str, Int64 | Int32]
    """`sample_ids` [B] int64 always; by request `input_ids`, `labels`, `position_ids`, `document_ids`
    [B, L] int64 and `cu_seqlens` [documents + 1] int32 over the flattened batch."""
