"""What always holds of blocks and sequences, as assertions: for tests, not for every step."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as List

from penstock.engine.scheduling.blocks import BlockPool
from penstock.engine.scheduling.prefix import names_of
from penstock.engine.scheduling.sequence import Sequence


def check(pool: BlockPool, running: List[Sequence], waiting: Iterable[Sequence], *, block_size: int) -> None:
    """Assert that blocks are counted, shared only where contents are equal, and nobody's otherwise.

    Raises:
        AssertionError: with the offending value.
    """
    uses = Counter(block for sequence in running for block in sequence.blocks[sequence.num_left :])
    for block in range(pool.num_blocks):
        assert pool.users(block) == uses[block], (block, pool.users(block), uses[block])
    assert pool.num_used == len(uses), (pool.num_used, len(uses))
    assert pool.num_used + pool.num_free == pool.num_blocks
    for sequence in waiting:
        assert not sequence.blocks, sequence
        assert not sequence.num_computed, sequence
        assert not sequence.num_left, sequence
    order = [(sequence.request.priority, sequence.id) for sequence in running]
    assert order == sorted(order), order
    for sequence in running:
        _check_sequence(pool, sequence, block_size)


def _check_sequence(pool: BlockPool, sequence: Sequence, block_size: int) -> None:
    assert sequence.finish is None, sequence
    assert sequence.num_computed < len(sequence.tokens), sequence
    assert sequence.num_computed <= len(sequence.blocks) * block_size, sequence
    num_full = sequence.num_computed // block_size
    names = names_of(sequence, block_size=block_size, num_blocks=num_full)
    assert sequence.num_left <= num_full, sequence
    for index, block in list(enumerate(sequence.blocks))[sequence.num_left :]:
        name = pool.name_of(block)
        if index < num_full:
            assert name in (None, names[index]), (sequence, index)
        else:  # it is going to be written
            assert name is None, (sequence, index)
            assert pool.users(block) == 1, (sequence, index)
