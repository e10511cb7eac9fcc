"""How a corpus that is read while it is prepared is cut into parts: a small one first, then larger ones.

Training can begin when the first part is there, so the first one is small; each further one has twice the
tokens, until they are as large as they are to be. Up to the size of a shard a part is one shard; a larger
one is several full shards. The sizes follow from the number of a shard alone, so that a run that was killed
cuts the rest as it would have. Parts are upper limits: a shard ends before the document that does not fit.
"""

from collections.abc import Iterator
from dataclasses import dataclass

FIRST_PART_TOKENS = 1_000_000
"""Tokenised within seconds on two cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The sizes of shards and parts, all at least 1."""

    first_part_tokens: int
    """Tokens of the first part at most."""
    part_tokens: int
    """Tokens of the largest parts at most."""
    shard_tokens: int
    """Tokens of a shard at most."""

    def shard_limit(self, shard: int) -> int:
        """Return the tokens of a shard at most.

        >>> growth = Growth(first_part_tokens=10, part_tokens=70, shard_tokens=30)
        >>> [growth.shard_limit(shard) for shard in range(5)]
        [10, 20, 30, 30, 30]
        """
        return min(self.first_part_tokens << min(shard, 64), self.shard_tokens, self.part_tokens)

    def part_ends(self, num_shards: int, *, done: bool) -> tuple[int, ...]:
        """Return the number of shards at the end of each part that is whole.

        Args:
            num_shards: finished so far.
            done: there will be no more, so the last part is whole as well.

        >>> growth = Growth(first_part_tokens=10, part_tokens=70, shard_tokens=30)
        >>> growth.part_ends(8, done=False), growth.part_ends(8, done=True)
        ((1, 2, 3, 5, 7), (1, 2, 3, 5, 7, 8))
        """
        ends = [end for end in self._ends(num_shards) if end <= num_shards]
        if done and num_shards > (ends[-1] if ends else 0):
            ends.append(num_shards)
        return tuple(ends)

    def _ends(self, num_shards: int) -> Iterator[int]:
        end = part = 0
        while end < num_shards:
            tokens = min(self.first_part_tokens << min(part, 64), self.part_tokens)
            end += max(1, tokens // self.shard_tokens)
            part += 1
            yield end
