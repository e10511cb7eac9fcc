"""KV cache blocks: free, in use, and cached for shared prefixes; integers only.

A block is used (by one sequence or more, counted), idle (used by none, its content still findable by hash) or
empty. Recently used content is likeliest to be needed again, so a new block is an empty one, else the idle
one whose last user left first. The hash of a block identifies its content; hashed blocks are full and never
written again, so any number of sequences can read one.

Keys and values at a position depend on the adapter and on every token up to it. So a block's hash covers the
previous block's hash and its own tokens, and the first hash covers the adapter and the request's salt: equal
hashes mean equal prefixes. A lookup follows the chain until a hash is unknown (vLLM's scheme; a radix tree,
Zheng et al., arXiv:2312.07104, finds the same blocks). The hash is cryptographic: a client that could
construct two contents with one hash could make other clients' answers depend on tokens that they did not
send. Each cache group has blocks of its own, so its number is part of the hash.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass
from hashlib import blake2b

from penstock.engine.request import Request
from penstock.engine.scheduling.groups import first_block
from penstock.engine.scheduling.sequence import Sequence

Name = bytes
"""Hash of a block's content and of everything before it."""


class BlockPool:
    """Pool of KV cache blocks, numbered from 0.

    Args:
        keep_idle: True: a hashed block that nobody uses can be found until its memory is needed.
    """

    def __init__(self, num_blocks: int, *, keep_idle: bool = True) -> None:
        self.num_blocks = num_blocks
        self._keep_idle = keep_idle
        self._users = [0] * num_blocks
        self._names: list[Name | None] = [None] * num_blocks
        self._by_name: dict[Name, int] = {}
        self._empty = list(range(num_blocks - 1, -1, -1))
        # ordered: popping the first key of a plain dict takes time linear in its length
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that no sequence uses, idle ones included."""
        return len(self._empty) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks in use."""
        return self.num_blocks - self.num_free

    def users(self, block: int) -> int:
        """Return the number of sequences that use a block."""
        return self._users[block]

    def name_of(self, block: int) -> Name | None:
        """Return the hash of a block, None if it has none."""
        return self._names[block]

    def find(self, name: Name) -> int | None:
        """Return the block with this hash; the caller does not use it yet."""
        return self._by_name.get(name)

    def take(self) -> int:
        """Allocate a block without a hash; there must be a free one."""
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._users[block] = 1
        return block

    def share(self, block: int) -> None:
        """Use a block that `find` returned."""
        self._users[block] += 1
        self._idle.pop(block, None)

    def name(self, block: int, name: Name) -> None:
        """Record the hash of a full block; if another block has the same hash, that one stays findable."""
        if self._names[block] is None and name not in self._by_name:
            self._names[block] = name
            self._by_name[name] = block

    def release(self, blocks: Iterable[int]) -> None:
        """Stop using these blocks; earlier ones in the list are evicted later."""
        for block in reversed(list(blocks)):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if self._names[block] is not None and self._keep_idle:
                self._idle[block] = None
            else:
                self._forget(block)
                self._empty.append(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Drop blocks in use from the prefix cache, because their contents are in doubt."""
        for block in blocks:
            self._forget(block)

    def forget_idle(self) -> None:
        """Drop all idle blocks from the prefix cache."""
        while self._idle:
            block, _ = self._idle.popitem()
            self._forget(block)
            self._empty.append(block)

    def _forget(self, block: int) -> None:
        name, self._names[block] = self._names[block], None
        if name is not None:
            del self._by_name[name]


def check(pool: BlockPool, running: List[Sequence], waiting: Iterable[Sequence], *, block_size: int) -> None:
    """Assert that block counts are right and blocks are shared only where contents are equal.

    Raises:
        AssertionError: with the offending value.
    """
    uses = Counter(block for sequence in running for table in sequence.tables for block in table.held)
    for block in range(pool.num_blocks):
        assert pool.users(block) == uses[block], (block, pool.users(block), uses[block])
    assert pool.num_used == len(uses), (pool.num_used, len(uses))
    assert pool.num_used + pool.num_free == pool.num_blocks
    for sequence in waiting:
        assert not sequence.tables, sequence
        assert not sequence.num_computed, sequence
    order = [(sequence.request.priority, sequence.id) for sequence in running]
    assert order == sorted(order), order
    for sequence in running:
        _check_sequence(pool, sequence, block_size)


def _check_sequence(pool: BlockPool, sequence: Sequence, block_size: int) -> None:
    assert sequence.finish is None, sequence
    assert sequence.num_computed < len(sequence.tokens), sequence
    num_full = sequence.num_computed // block_size
    names = names_of(sequence, block_size=block_size, num_blocks=num_full)
    for group, table in enumerate(sequence.tables):
        assert sequence.num_computed <= len(table.blocks) * block_size, sequence
        assert table.num_released <= num_full, sequence
        for index, block in enumerate(table.held, table.num_released):
            name = pool.name_of(block)
            if index < num_full:
                assert name in (None, _in_group(names[index], group)), (sequence, index)
            else:  # will be written
                assert name is None, (sequence, index)
                assert pool.users(block) == 1, (sequence, index)


def names_of(sequence: Sequence, *, block_size: int, num_blocks: int) -> list[Name]:
    """Return the hashes of a sequence's first full blocks, at least `num_blocks`; computed once and kept."""
    names, tokens = sequence.names, sequence.tokens
    while len(names) < num_blocks:
        start = len(names) * block_size
        before = names[-1] if names else _root(sequence.request)
        names.append(_hash(before + array("q", tokens[start : start + block_size]).tobytes()))
    return names


@dataclass(frozen=True, slots=True)
class Prefix:
    """Cached blocks of the beginning of a sequence."""

    num_blocks: int
    """Blocks whose tokens need not be computed."""
    blocks: tuple[List[int], ...]
    """Of each cache group: the last of these blocks, those that later tokens see."""


def find_prefix(
    pool: BlockPool, sequence: Sequence, *, block_size: int, windows: List[int | None] = (None,)
) -> Prefix:
    """Return the cached blocks of a sequence's longest prefix, never all of its tokens.

    The last token is always computed: its logits give the next token, its hidden state the embedding. So are
    all tokens whose logits are needed to score the prompt. Every cache group shortens the prefix: one without
    a window needs all blocks, one with a window those that the token after the prefix sees.

    Args:
        windows: of each cache group.
    """
    wanted = sequence.scored.start if sequence.is_scored else len(sequence.tokens) - 1
    count = min(wanted, len(sequence.tokens) - 1) // block_size
    found: dict[tuple[int, int], int] = {}  # by group and place

    def is_cached(group: int, index: int) -> bool:
        names = names_of(sequence, block_size=block_size, num_blocks=index + 1)
        block = pool.find(_in_group(names[index], group))
        if block is not None:
            found[group, index] = block
        return block is not None

    for group, window in enumerate(windows):
        if window is None:
            count = next((index for index in range(count) if not is_cached(group, index)), count)
    before = -1
    while count != before:  # one group may shorten what another one has found
        before = count
        for group, window in enumerate(windows):
            index = count
            while window is not None and index > first_block(count * block_size, window, block_size):
                index -= 1
                if not is_cached(group, index):
                    count = index
    firsts = [first_block(count * block_size, window, block_size) for window in windows]
    return Prefix(
        count,
        tuple([found[group, index] for index in range(first, count)] for group, first in enumerate(firsts)),
    )


def name_blocks(pool: BlockPool, sequence: Sequence, *, block_size: int, since: int) -> None:
    """Record the hashes of blocks that became full since `since` computed tokens."""
    first, end = since // block_size, sequence.num_computed // block_size
    if first < end:
        names = names_of(sequence, block_size=block_size, num_blocks=end)
        for group, table in enumerate(sequence.tables):
            for index in range(first, end):
                pool.name(table.blocks[index], _in_group(names[index], group))


def _in_group(name: Name, group: int) -> Name:
    return name + group.to_bytes(2) if group else name


def _root(request: Request) -> Name:
    adapter = (request.adapter or "").encode()
    return _hash(len(adapter).to_bytes(4, "big") + adapter + request.salt.encode())


def _hash(content: bytes) -> Name:
    return blake2b(content, digest_size=32).digest()
