"""N-gram drafts (prompt lookup): what followed the last tokens at their previous occurrence; no torch.

Prompt lookup (Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding; Yang et al.,
arXiv:2304.04487): summaries, code edits and answers about a document repeat the prompt. Each sequence has a
table from its n-grams to where they last ended, so a step costs a few lookups, and one entry per size for
each new token.
"""

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from penstock.engine.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from penstock.engine.speculation.speculation import CompletedStep


SIZES = (4, 3, 2)
"""Lengths of n-grams, in this order: a longer match is more reliable. Single tokens match too often."""

_BITS = 24  # bits of a token id within a key; ids are stored plus one, so sizes cannot collide


class NgramIndex:
    """Positions where the n-grams of one growing token list last ended.

    >>> index = NgramIndex()
    >>> index.following([1, 2, 3, 4, 1, 2], 3)
    (3, 4, 1)
    """

    def __init__(self) -> None:
        self._after: dict[int, int] = {}  # n-gram -> position of the token after its last occurrence
        self._num_indexed = 0

    def following(self, tokens: Many[int], num: int) -> tuple[int, ...]:
        """Return what followed the previous occurrence of the end of `tokens`; may be empty.

        Args:
            tokens: those of the last call and more; the list only grows.
            num: maximum tokens to return. Past the end the match is assumed to repeat.
        """
        self._add(tokens)
        for size in SIZES:
            if len(tokens) > size and (start := self._after.get(_key(tokens[-size:]))) is not None:
                period = len(tokens) - start
                return tuple(tokens[start + i % period] for i in range(num))
        return ()

    def _add(self, tokens: Many[int]) -> None:
        """Index the n-grams that are followed by a token: not those at the end."""
        if not self._num_indexed and len(tokens) > 1:
            self._add_all(tokens)
        for end in range(self._num_indexed + 1, len(tokens)):
            for size in SIZES:
                if end >= size:
                    self._after[_key(tokens[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)

    def _add_all(self, tokens: Many[int]) -> None:
        """Index a whole prompt, in a tenth of the time of token by token."""
        last = len(tokens) - 1
        keys = [0] * last
        for size in range(1, max(SIZES) + 1):
            # keys[i] is the key of the n-gram that ends with token i, once it has its size
            shifted = [0, *keys[:-1]]
            keys = [
                (before << _BITS) | (token + 1) for before, token in zip(shifted, tokens[:last], strict=True)
            ]
            if size in SIZES:
                self._after.update(zip(keys[size - 1 :], range(size, last + 1), strict=True))
        self._num_indexed = last


def _key(ngram: Many[int]) -> int:
    key = 0
    for token in ngram:
        key = (key << _BITS) | (token + 1)
    return key


class NgramDrafter:
    """Drafts by looking up the end of each sequence in the sequence itself."""

    def __init__(self) -> None:
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, done: "CompletedStep", wanted: Many[int]) -> list[tuple[int, ...]]:
        """Return drafts; see `Drafter`."""
        return [
            self._following(share.sequence, num) if num else ()
            for share, num in zip(done.plan.shares, wanted, strict=True)
        ]

    def forget(self, sequence: Sequence) -> None:
        """Drop the table of a sequence."""
        self._indexes.pop(sequence.id, None)

    def _following(self, sequence: Sequence, num: int) -> tuple[int, ...]:
        index = self._indexes.setdefault(sequence.id, NgramIndex())
        return index.following(sequence.tokens, num)
