"""A corpus: its shards as one token index space, in manifest order.

Opening reads the manifest only; a shard is mapped when one of its tokens is first needed.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np

from penstock.core.errors import CorpusError
from penstock.data.formats import Tokens, TokenShard
from penstock.data.manifest import Manifest
from penstock.data.types import Fragments, Int64

_NEAR_TOKENS = 2**15  # most documents end within as many
_OPEN_SHARDS = 1024  # memory maps kept; below the common limit of 1,024 x 64 per process


class Corpus:
    """Tokens [0, num_tokens) over all shards. Thread-safe: nothing in it changes but caches.

    Args:
        location: where it lies, for messages.
        manifest: what it is; its shards may be left out where `starts` says where they are.
        starts: [shards + 1] int64, the first token of each shard, then the number of tokens.
        open_shard: opens the shard of an index.
        tokenizer_path: the tokenizer it was made with, as a file of this machine, if it came with one; or
            what fetches it when it is asked for.
    """

    def __init__(
        self,
        location: str,
        manifest: Manifest,
        *,
        starts: Int64,
        open_shard: Callable[[int], TokenShard],
        tokenizer_path: Path | Callable[[], Path] | None = None,
    ) -> None:
        self.location = location
        self.manifest = manifest
        self.num_tokens = int(starts[-1])
        self.num_documents = manifest.num_documents
        self.fingerprint = manifest.fingerprint
        self._tokenizer_path = tokenizer_path
        self.preparation: object = None
        """What prepares the rest of it as long as it is referred to; None: nothing of this process does."""
        self.starts = starts
        self._starts: list[int] = starts.tolist()  # a list, which bisect searches faster than an array
        self.shard = lru_cache(maxsize=_OPEN_SHARDS)(open_shard)

    @property
    def tokenizer_path(self) -> Path | None:
        """The tokenizer it was made with, as a file of this machine; None if it came without one.

        Raises:
            CorpusError: it is far away and cannot be fetched.
        """
        found = self._tokenizer_path
        return found() if callable(found) else found

    @property
    def part_ends(self) -> list[int]:
        """Tokens at the end of each part; a corpus that never grew is one part."""
        ends = self.manifest.parts
        return [self._starts[end] for end in ends] if ends else [self.num_tokens]

    @cached_property
    def _first_documents(self) -> list[int]:
        return [0, *accumulate(shard.documents for shard in self.manifest.shards)]

    def shard_name(self, shard: int) -> str:
        """Return the file of a shard; of a computed corpus, its number."""
        return self.manifest.shards[shard].name if self.manifest.shards else str(shard)

    def first_document(self, shard: int) -> int:
        """Return the number of a shard's first document; in a computed corpus each shard counts from 0."""
        return self._first_documents[shard] if self.manifest.shards else 0

    def shard_of_document(self, document: int) -> int:
        """Return the shard that holds a document."""
        return bisect_right(self._first_documents, document) - 1

    def fingerprint_of(self, parts: int) -> str:
        """Return the fingerprint of the first parts; of none, an empty one."""
        if not parts:
            return ""
        whole = parts == len(self.manifest.part_ends)
        return self.fingerprint if whole else self.manifest.first_parts(parts).fingerprint

    def locate(self, positions: Int64) -> tuple[Int64, Int64]:
        """Return the shard index and the position inside that shard of corpus positions [n]."""
        shards = np.searchsorted(self.starts, positions, side="right") - 1
        return shards, positions - self.starts[shards]

    def tokens(self, start: int, stop: int) -> Tokens:
        """Return the tokens of corpus positions [start, stop): a copy where they span shards."""
        parts = [self.shard(index).tokens[low:high] for index, _, low, high in self._spans(start, stop)]
        if len(parts) == 1:
            return parts[0]
        joined: Tokens = np.concatenate(parts)
        return joined

    def fragments(self, ranges: Sequence[tuple[int, int]]) -> Fragments:
        """Cut ranges [start, stop) of corpus positions at document ends, range by range."""
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
                f"Document offsets of corpus {self.location} do not rise",
                fix="Run `penstock data verify` on it.",
            )
        continued = np.zeros(count, dtype=np.bool_)
        continued[unfinished] = True
        fragments = Fragments(np.repeat(shards, nums), first, lengths, continued)
        return fragments if shortest else fragments.take(np.flatnonzero(lengths > 0))  # less the empty ones

    def next_document(self, position: int) -> int:
        """Return the smallest document start that is >= position, or num_tokens."""
        while position < self.num_tokens:
            index = bisect_right(self._starts, position) - 1
            base, end = self._starts[index], self._starts[index + 1]
            if position == base:
                return position
            # A document that ends at p means one that starts at p: ask for ends in [position, end), not for
            # all of a large shard's at once.
            low, window = position - base - 1, _NEAR_TOKENS
            while not len(ends := self.shard(index).document_ends(low, min(end - base, low + window))):
                window *= 16
            return base + int(ends[0])
        return self.num_tokens

    def spans(self, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """Split ranges of corpus positions at shards: (shard, its own first position, past-the-last)."""
        for start, stop in ranges:
            for index, _, low, high in self._spans(start, stop):
                yield index, low, high

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Split positions [start, stop) at shards: (shard, its first position, local start, local stop)."""
        index = bisect_right(self._starts, start) - 1
        while start < stop:
            base, end = self._starts[index], self._starts[index + 1]
            if start < end:
                yield index, base, start - base, min(stop, end) - base
                start = min(stop, end)
            index += 1
