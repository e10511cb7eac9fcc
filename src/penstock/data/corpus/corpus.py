"""Corpus: the shards of a manifest as one range of token positions.

Opening reads the manifest only; a shard is mapped when one of its tokens is first needed.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.arrays import Int64, Tokens, address
from penstock.core.errors import CorpusError
from penstock.data.corpus.columns import TokenColumn
from penstock.data.corpus.manifest import Manifest
from penstock.data.formats import TokenShard
from penstock.data.formats.index import DocumentEnds
from penstock.data.types import Fragments

_NEAR_TOKENS = 2**15  # first search window for the next document end; most documents are shorter
_OPEN_SHARDS = 1024  # memory maps kept open; the common limit is 1,024 x 64 per process


_TYPES = {2: 0, 4: 1}  # bytes per token -> type code in native/rows.c


@dataclass(frozen=True, slots=True)
class ShardRanges:
    """Token ranges split at shard boundaries, in the layout that native/pools.c reads."""

    table: Int64
    """[n, 7] shard, first token, past-the-last token, address of its document ends, their number; two output
    columns for the document ends inside the range."""
    owners: Sequence[DocumentEnds]
    """Document ends that the addresses point into, kept alive."""


@dataclass(frozen=True, slots=True)
class TokenMap:
    """Memory-mapped tokens of a shard."""

    tokens: npt.NDArray[Any]  # Any: uint16 or uint32
    record: tuple[int, int, int, int]
    """Shard, address, number of tokens and type code: `map` in native/rows.c."""


class Corpus:
    """Tokens [0, num_tokens) over all shards. Thread-safe: only its caches change.

    Args:
        location: path or address, for messages.
        manifest: manifest of the corpus; its shards may be left out if `starts` is given for a computed
            corpus.
        starts: [shards + 1] int64, the first token of each shard, then the number of tokens.
        open_shard: index -> opened shard.
        tokenizer_path: local file of the corpus's tokenizer, or a function that fetches it; None: it has
            none.
        columns: columns of values per token, by name.
    """

    def __init__(
        self,
        location: str,
        manifest: Manifest,
        *,
        starts: Int64,
        open_shard: Callable[[int], TokenShard],
        tokenizer_path: Path | Callable[[], Path] | None = None,
        columns: Mapping[str, TokenColumn] | None = None,
    ) -> None:
        self.location = location
        self.columns: Mapping[str, TokenColumn] = columns or {}
        """Columns beside its tokens, by name; see columns.py."""
        self.manifest = manifest
        self.num_tokens = int(starts[-1])
        self.num_documents = manifest.num_documents
        self.fingerprint = manifest.fingerprint
        self._tokenizer_path = tokenizer_path
        self.preparation: object = None
        """Handle that keeps the preparation of the remaining parts running; None: this process runs none."""
        self.starts = starts
        self._starts: list[int] = starts.tolist()  # a list, which bisect searches faster than an array
        self._token_maps: dict[int, TokenMap] = {}
        self.shard = lru_cache(maxsize=_OPEN_SHARDS)(open_shard)

    @property
    def tokenizer_path(self) -> Path | None:
        """Local file of the corpus's tokenizer; None if it has none.

        Raises:
            CorpusError: it is remote and cannot be fetched.
        """
        found = self._tokenizer_path
        return found() if callable(found) else found

    @property
    def part_ends(self) -> list[int]:
        """Number of tokens up to the end of each part; a corpus that never grew is one part."""
        ends = self.manifest.parts
        return [self._starts[end] for end in ends] if ends else [self.num_tokens]

    @cached_property
    def _first_documents(self) -> list[int]:
        return [0, *accumulate(shard.documents for shard in self.manifest.shards)]

    def shard_name(self, shard: int) -> str:
        """Return the file name of a shard; for a computed corpus, its number."""
        return self.manifest.shards[shard].name if self.manifest.shards else str(shard)

    def first_document(self, shard: int) -> int:
        """Return the number of a shard's first document; 0 for every shard of a computed corpus."""
        return self._first_documents[shard] if self.manifest.shards else 0

    def shard_of_document(self, document: int) -> int:
        """Return the shard that contains a document."""
        return bisect_right(self._first_documents, document) - 1

    def fingerprint_of(self, parts: int) -> str:
        """Return the fingerprint of the first `parts` parts; "" for none."""
        if not parts:
            return ""
        whole = parts == len(self.manifest.part_ends)
        return self.fingerprint if whole else self.manifest.first_parts(parts).fingerprint

    def locate(self, positions: Int64) -> tuple[Int64, Int64]:
        """Return the shard and the position within the shard of corpus positions [n]."""
        shards = np.searchsorted(self.starts, positions, side="right") - 1
        return shards, positions - self.starts[shards]

    def tokens(self, start: int, stop: int) -> Tokens:
        """Return the tokens of corpus positions [start, stop); a copy if they span shards."""
        parts = [self.shard(index).tokens[low:high] for index, _, low, high in self._spans(start, stop)]
        if len(parts) == 1:
            return parts[0]
        joined: Tokens = np.concatenate(parts)
        return joined

    def fragments(self, ranges: Sequence[tuple[int, int]]) -> Fragments:
        """Cut ranges [start, stop) of corpus positions at document ends, in the order of the ranges.

        Raises:
            CorpusError: the document offsets of a shard are not ascending.
        """
        if not ranges:
            none = np.empty(0, dtype=np.int64)
            return Fragments(none, none, none, none.astype(np.bool_))
        ends: list[Int64] = []
        spans = []  # (shard, its first position, first position of the span, fragments)
        unfinished = []
        count = 0
        for start, stop in ranges:
            for index, base, low, high in self._spans(start, stop):
                found = self.shard(index).document_ends(low, high)
                ends.append(found)
                num = len(found)
                if not num or found[-1] != high:
                    ends.append(np.array((high,)))
                    num += 1
                    unfinished.append(count + num - 1)
                spans.append((index, base, base + low, num))
                count += num
        shards, bases, firsts, nums = np.array(spans, dtype=np.int64).T
        past = np.concatenate(ends)
        past += np.repeat(bases, nums)
        first = np.empty_like(past)
        first[1:] = past[:-1]
        first[np.cumsum(nums) - nums] = firsts
        lengths = past - first
        if (shortest := lengths.min()) < 0:
            raise CorpusError(
                f"Document offsets of corpus {self.location} are not ascending",
                fix="Run `penstock data verify` on it.",
            )
        continued = np.zeros(count, dtype=np.bool_)
        continued[unfinished] = True
        fragments = Fragments(np.repeat(shards, nums), first, lengths, continued)
        return fragments if shortest else fragments.take(np.flatnonzero(lengths > 0))  # without empty ones

    def shard_ranges(self, ranges: Sequence[tuple[int, int]]) -> ShardRanges | None:
        """Return ranges of corpus positions for the compiled packing; None if it cannot read them.

        It cannot if the document ends of a shard are computed or fetched.
        """
        rows, owners = [], []
        for start, stop in ranges:
            for index, _, low, high in self._spans(start, stop):
                ends = self.shard(index).document_ends
                found = getattr(ends, "__self__", None)
                if not isinstance(found, DocumentEnds) or found.in_memory is None:
                    return None
                owners.append(found)
                rows.append((index, low, high, *found.in_memory, 0, 0))
        return ShardRanges(np.array(rows, dtype=np.int64), owners) if rows else None

    def token_map(self, shard: int) -> TokenMap | None:
        """Return the memory map of a shard's tokens; None if they are fetched, computed or converted."""
        found = self._token_maps.get(shard)
        tokens = self.shard(shard).tokens
        if found is None or found.tokens is not tokens:
            if not (isinstance(tokens, np.ndarray) and tokens.flags.c_contiguous):
                return None
            if tokens.dtype.kind != "u" or tokens.itemsize not in _TYPES:
                return None
            found = TokenMap(tokens, (shard, address(tokens), len(tokens), _TYPES[tokens.itemsize]))
            if len(self._token_maps) >= _OPEN_SHARDS:
                self._token_maps.clear()
            self._token_maps[shard] = found
        return found

    def next_document(self, position: int) -> int:
        """Return the smallest document start that is >= position, or num_tokens."""
        while position < self.num_tokens:
            index = bisect_right(self._starts, position) - 1
            base, end = self._starts[index], self._starts[index + 1]
            if position == base:
                return position
            # A document that ends at p is followed by one that starts at p: search the ends in [position,
            # end) in growing windows instead of reading all of a large shard's.
            low, window = position - base - 1, _NEAR_TOKENS
            while not len(ends := self.shard(index).document_ends(low, min(end - base, low + window))):
                window *= 16
            return base + int(ends[0])
        return self.num_tokens

    def spans(self, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """Split ranges of corpus positions at shards; yield (shard, start, stop) within the shard."""
        for start, stop in ranges:
            for index, _, low, high in self._spans(start, stop):
                yield index, low, high

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Split positions [start, stop) at shards; yield (shard, its first position, start, stop)."""
        index = bisect_right(self._starts, start) - 1
        while start < stop:
            base, end = self._starts[index], self._starts[index + 1]
            if start < end:
                yield index, base, start - base, min(stop, end) - base
                start = min(stop, end)
            index += 1
