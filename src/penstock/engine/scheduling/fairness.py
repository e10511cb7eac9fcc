"""Whose turn it is among those who wait: priorities are strict, clients of one priority take turns.

Each client has a counter of what it was served, and the next sequence admitted is the oldest of the
client with the smallest (virtual token counter; Sheng et al., OSDI 2024, arXiv:2401.00588). Two clients that
both have work waiting are so served alike, to within what one step and the running sequences add, however
many requests either sends. Who comes back after a pause starts at the smallest counter of those who wait:
no credit is saved up. A drawn token counts twice a prompt's; tokens found in the cache cost nothing and
count nothing.

There is no ageing: what has a worse priority waits as long as there is better. A deadline bounds the wait.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from penstock.engine.scheduling.sequence import Sequence

PROMPT_WEIGHT = 1
DRAWN_WEIGHT = 2
_MANY_COUNTERS = 1024  # of clients with nothing to do, before those that say nothing are forgotten


class Turns:
    """The waiting sequences of one priority."""

    def __init__(self) -> None:
        self._lines: dict[str, list[Sequence]] = {}
        # (counter when it was put here, client); counters only grow, so a stale first one is put back
        self._heap: list[tuple[int, str]] = []
        self._in_heap: set[str] = set()
        self.served: dict[str, int] = {}
        self._last = ""  # the client that was the last to have nothing waiting
        self._forget_at = _MANY_COUNTERS
        self._length = 0

    def __len__(self) -> int:
        """Sequences that wait."""
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in no particular order."""
        for line in self._lines.values():
            yield from line

    def put(self, sequence: Sequence) -> None:
        """Let a sequence wait, before the younger ones of its client."""
        client = sequence.request.client
        if client not in self._lines:
            self._enter(client)
        insort(self._lines[client], sequence, key=_youngest_first)
        self._length += 1

    def peek(self) -> Sequence | None:
        """Return whose turn it is."""
        while self._heap:
            counter, client = self._heap[0]
            if client not in self._lines:
                self._in_heap.remove(heapq.heappop(self._heap)[1])
            elif counter < self.served[client]:
                heapq.heapreplace(self._heap, (self.served[client], client))
            else:
                return self._lines[client][-1]
        return None

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence wait no longer; its cost does not grow with how many wait but by a small copy."""
        client = sequence.request.client
        line = self._lines[client]
        place = bisect_left(line, _youngest_first(sequence), key=_youngest_first)
        assert line[place] is sequence, sequence.id
        del line[place]
        self._length -= 1
        if not line:
            self._last = client
            del self._lines[client]

    def charge(self, client: str, amount: int) -> None:
        """Count what a client was served."""
        self.served[client] = self.served.get(client, self.served.get(self._last, 0)) + amount

    def _enter(self, client: str) -> None:
        first = self.peek()
        level = self.served.get(self._last if first is None else first.request.client, 0)
        if len(self.served) >= self._forget_at:
            # who is not above the level would be lifted to it anyway
            kept = {*self._lines, self._last}
            self.served = {name: n for name, n in self.served.items() if n > level or name in kept}
            self._forget_at = _MANY_COUNTERS + 2 * len(self.served)
        self._lines[client] = []
        self.served[client] = max(self.served.get(client, 0), level)
        if client not in self._in_heap:
            self._in_heap.add(client)
            heapq.heappush(self._heap, (self.served[client], client))


class WaitingLine:
    """All waiting sequences, the smallest priority number first."""

    def __init__(self) -> None:
        self._classes: dict[int, Turns] = {}
        self._filled: list[int] = []  # priorities in which any waits, ascending
        self._length = 0
        self.num_tokens = 0
        """Of all that wait, as far as they are known."""

    def __len__(self) -> int:
        """Sequences that wait."""
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in no particular order."""
        for turns in self._classes.values():
            yield from turns

    def put(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        turns = self._turns(sequence)
        if not len(turns):
            insort(self._filled, sequence.request.priority)
        turns.put(sequence)
        self._length += 1
        self.num_tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence wait no longer."""
        turns = self._turns(sequence)
        turns.remove(sequence)
        if not len(turns):
            self._filled.remove(sequence.request.priority)
        self._length -= 1
        self.num_tokens -= len(sequence.tokens)

    def peek(self) -> Sequence | None:
        """Return the one to be admitted next."""
        return self._classes[self._filled[0]].peek() if self._filled else None

    def charge(self, sequence: Sequence, amount: int) -> None:
        """Count what a sequence's client was served."""
        self._turns(sequence).charge(sequence.request.client, amount)

    def _turns(self, sequence: Sequence) -> Turns:
        turns = self._classes.get(sequence.request.priority)
        if turns is None:
            turns = self._classes[sequence.request.priority] = Turns()
        return turns


def _youngest_first(sequence: Sequence) -> int:
    return -sequence.id
