"""Which blocks of the cache are in use, and which hold what somebody may ask for again; integers only.

A block is used by some sequences (it counts them), idle (used by none, its content can still be found by
name) or empty. What is asked for again is likeliest what was used last, so a new block is an empty one,
else the idle one whose last user left first. A block's name says its content exactly; named blocks are
full and never written again, so that any number of sequences can read one.
"""

from collections import OrderedDict
from collections.abc import Iterable

Name = bytes
"""What a block holds: see `engine.scheduling.prefix`."""


class BlockPool:
    """Blocks 0 to num_blocks - 1.

    Args:
        keep_idle: whether a named block that nobody uses can be found until its room is needed.
    """

    def __init__(self, num_blocks: int, *, keep_idle: bool = True) -> None:
        self.num_blocks = num_blocks
        self._keep_idle = keep_idle
        self._users = [0] * num_blocks
        self._names: list[Name | None] = [None] * num_blocks
        self._by_name: dict[Name, int] = {}
        self._empty = list(range(num_blocks - 1, -1, -1))
        # ordered, because the first key of a plain dict that is popped at its front costs its length
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, idle ones included."""
        return len(self._empty) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that somebody uses."""
        return self.num_blocks - self.num_free

    def users(self, block: int) -> int:
        """How many sequences use a block."""
        return self._users[block]

    def name_of(self, block: int) -> Name | None:
        """What a block holds, if it was named."""
        return self._names[block]

    def find(self, name: Name) -> int | None:
        """Return the block that holds this; its caller does not use it yet."""
        return self._by_name.get(name)

    def take(self) -> int:
        """Return an unnamed block, used by the caller; there must be a free one."""
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._users[block] = 1
        return block

    def share(self, block: int) -> None:
        """Use a block that was found."""
        self._users[block] += 1
        self._idle.pop(block, None)

    def name(self, block: int, name: Name) -> None:
        """Say what a full block holds; if another holds the same, that one keeps being found."""
        if self._names[block] is None and name not in self._by_name:
            self._names[block] = name
            self._by_name[name] = block

    def release(self, blocks: Iterable[int]) -> None:
        """Use these no longer; those given first are kept longest."""
        for block in reversed(list(blocks)):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if self._names[block] is not None and self._keep_idle:
                self._idle[block] = None
            else:
                self._forget(block)
                self._empty.append(block)

    def forget_idle(self) -> None:
        """Let nothing be found any more of what nobody uses."""
        while self._idle:
            block, _ = self._idle.popitem()
            self._forget(block)
            self._empty.append(block)

    def _forget(self, block: int) -> None:
        name, self._names[block] = self._names[block], None
        if name is not None:
            del self._by_name[name]
