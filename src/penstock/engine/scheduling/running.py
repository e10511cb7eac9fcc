"""The running sequences and the blocks they hold: how one enters, grows and leaves; integers only.

Who does so, and when, is decided by `scheduler.py`. Blocks for all known tokens are taken on entering, so
a prompt never stops half-way for want of them; from then on a sequence takes one whenever its last is full.
"""

from bisect import insort

from penstock.engine.scheduling.blocks import BlockPool
from penstock.engine.scheduling.sequence import Sequence


class Running:
    """Sequences that hold blocks; those of others that are equal are shared.

    Args:
        most: how many there may be.
    """

    def __init__(self, pool: BlockPool, *, block_size: int, most: int) -> None:
        self.sequences: list[Sequence] = []
        """By (priority, id): the last is the first to make way."""
        self.most = most
        self._pool = pool
        self._block_size = block_size

    def blocks_of(self, num_tokens: int) -> int:
        """Return how many blocks so many positions fill, the last of them perhaps in part."""
        return -(-num_tokens // self._block_size)

    def fits(self, sequence: Sequence, found: list[int]) -> bool:
        """Return whether one can enter that shares the blocks found.

        Room for the next block of each running sequence is left: who enters shall not drive others out.
        """
        if len(self.sequences) >= self.most:
            return False
        new = self.blocks_of(len(sequence.tokens)) - sum(self._pool.users(block) > 0 for block in found)
        return new + len(self.sequences) <= self._pool.num_free

    def enter(self, sequence: Sequence, found: list[int]) -> None:
        """Share the blocks found, which hold its beginning, and take those for the rest; it has to fit."""
        insort(self.sequences, sequence, key=_order)
        for block in found:
            self._pool.share(block)
        sequence.blocks.extend(found)
        for _ in range(self.blocks_of(len(sequence.tokens)) - len(found)):
            sequence.blocks.append(self._pool.take())
        sequence.num_computed = len(found) * self._block_size

    def leave(self, sequence: Sequence) -> None:
        """Give back all blocks; what they hold can be found by name until their room is needed."""
        self.sequences.remove(sequence)
        self._pool.release(sequence.blocks[sequence.num_left :])
        del sequence.blocks[:]
        sequence.num_left = 0

    def is_full(self, sequence: Sequence) -> bool:
        """Whether the last known token has no place in the blocks."""
        return len(sequence.tokens) > len(sequence.blocks) * self._block_size

    def grow(self, sequence: Sequence) -> None:
        """Take one block more; there must be a free one."""
        sequence.blocks.append(self._pool.take())

    def stretch(self, sequence: Sequence, num_positions: int) -> int:
        """Take free blocks, but nobody's, for positions after the known tokens; return how many there are."""
        length = len(sequence.tokens)
        while self._pool.num_free and length + num_positions > len(sequence.blocks) * self._block_size:
            self.grow(sequence)
        return max(0, min(num_positions, len(sequence.blocks) * self._block_size - length))

    def leave_behind(self, sequence: Sequence, since: int) -> None:
        """Give back the blocks before a position that hold nothing else; they can still be found by name."""
        num_left = since // self._block_size
        if num_left > sequence.num_left:
            self._pool.release(sequence.blocks[sequence.num_left : num_left])
            sequence.num_left = num_left


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.priority, sequence.id
