"""The queue of waiting requests: strict priorities, round robin over clients, parallel sampling.

Each client has a counter of the tokens it was served. The next sequence admitted is the oldest one of the
client with the smallest counter (virtual token counter; Sheng et al., OSDI 2024, arXiv:2401.00588). So two
clients that always have waiting requests are served equally, up to one step and the running sequences,
however many requests either sends. A client that returns after a pause starts at the smallest counter of the
waiting clients: no credit is saved. A sampled token counts twice a prompt token; tokens from the prefix cache
count nothing.

There is no ageing: a request waits as long as there are better priorities. A deadline bounds the wait.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from penstock.engine.scheduling.sequence import Sequence

PROMPT_WEIGHT = 1
SAMPLED_WEIGHT = 2
_MANY_COUNTERS = 1024  # counters of idle clients before those without effect are dropped


class ClientRoundRobin:
    """Round robin over clients, for the waiting sequences of one priority."""

    def __init__(self) -> None:
        self._lines: dict[str, list[Sequence]] = {}
        # (counter when pushed, client); counters only grow, so a stale first entry is pushed again
        self._heap: list[tuple[int, str]] = []
        self._in_heap: set[str] = set()
        self.served: dict[str, int] = {}
        self._last = ""  # the client whose queue became empty last
        self._forget_at = _MANY_COUNTERS
        self._length = 0

    def __len__(self) -> int:
        """Number of waiting sequences."""
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Yield all waiting sequences, in no particular order."""
        for line in self._lines.values():
            yield from line

    def put(self, sequence: Sequence) -> None:
        """Queue a sequence, before the younger ones of its client."""
        client = sequence.request.client
        if client not in self._lines:
            self._enter(client)
        insort(self._lines[client], sequence, key=_youngest_first)
        self._length += 1

    def peek(self) -> Sequence | None:
        """Return the next sequence to admit; None if there is none."""
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
        """Remove a sequence, in logarithmic time plus a small copy."""
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
        """Add tokens served to a client's counter."""
        self.served[client] = self.served.get(client, self.served.get(self._last, 0)) + amount

    def _enter(self, client: str) -> None:
        first = self.peek()
        level = self.served.get(self._last if first is None else first.request.client, 0)
        if len(self.served) >= self._forget_at:
            # a counter at or below the level would be raised to it anyway
            kept = {*self._lines, self._last}
            self.served = {name: n for name, n in self.served.items() if n > level or name in kept}
            self._forget_at = _MANY_COUNTERS + 2 * len(self.served)
        self._lines[client] = []
        self.served[client] = max(self.served.get(client, 0), level)
        if client not in self._in_heap:
            self._in_heap.add(client)
            heapq.heappush(self._heap, (self.served[client], client))


class WaitingQueue:
    """All waiting sequences, in order of priority."""

    def __init__(self) -> None:
        self._classes: dict[int, ClientRoundRobin] = {}
        self._filled: list[int] = []  # priorities with waiting sequences, ascending
        self._length = 0
        self.num_tokens = 0
        """Known tokens of all waiting sequences."""

    def __len__(self) -> int:
        """Number of waiting sequences."""
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Yield all waiting sequences, in no particular order."""
        for turns in self._classes.values():
            yield from turns

    def put(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        turns = self._turns(sequence)
        if not len(turns):
            insort(self._filled, sequence.request.priority)
        turns.put(sequence)
        self._length += 1
        self.num_tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        turns = self._turns(sequence)
        turns.remove(sequence)
        if not len(turns):
            self._filled.remove(sequence.request.priority)
        self._length -= 1
        self.num_tokens -= len(sequence.tokens)

    def peek(self) -> Sequence | None:
        """Return the next sequence to admit; None if there is none."""
        return self._classes[self._filled[0]].peek() if self._filled else None

    def charge(self, sequence: Sequence, amount: int) -> None:
        """Add tokens served to the counter of a sequence's client."""
        self._turns(sequence).charge(sequence.request.client, amount)

    def _turns(self, sequence: Sequence) -> ClientRoundRobin:
        turns = self._classes.get(sequence.request.priority)
        if turns is None:
            turns = self._classes[sequence.request.priority] = ClientRoundRobin()
        return turns


def _youngest_first(sequence: Sequence) -> int:
    return -sequence.id


class Siblings:
    """Parallel sampling: one sequence of a request computes the prompt while the others, in `_held`, wait."""

    def __init__(self) -> None:
        self._held: dict[int, list[Sequence]] = {}

    def __len__(self) -> int:
        """Number of sequences that wait for another one's prompt."""
        return sum(len(held) for held in self._held.values())

    def holds(self, sequence: Sequence) -> bool:
        """Register a new sequence; return True if it has to wait for another one's prompt."""
        if sequence.answer == 0:
            if sequence.request.num_answers > 1:
                self._held[sequence.request_id] = []
            return False
        held = self._held.get(sequence.request_id)
        if held is not None:
            held.append(sequence)
        return held is not None

    def computed(self, sequence: Sequence) -> list[Sequence]:
        """Return the sequences that waited for this one's prompt, which is complete now."""
        return self._held.pop(sequence.request_id, []) if self._held else []

    def remove(self, sequence: Sequence) -> bool:
        """Remove a finished sequence; return True if it was waiting here."""
        held = self._held.get(sequence.request_id, [])
        if sequence not in held:
            return False
        held.remove(sequence)
        return True

    def successor_of(self, sequence: Sequence) -> Sequence | None:
        """Return the sequence that computes the prompt now that `sequence` finished early; None: not
        needed."""
        held = self._held.get(sequence.request_id)
        if held:
            return held.pop(0)
        self._held.pop(sequence.request_id, None)
        return None
