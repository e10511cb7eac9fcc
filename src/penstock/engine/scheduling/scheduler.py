"""Scheduler: which sequences compute which of their tokens in a step; integers only.

There is one kind of work: a sequence has tokens, some of which are computed. A decode step is a share of one
token (plus drafts), a prefill chunk a share of many, and one step has both (Orca, OSDI 2022; Sarathi-Serve,
OSDI 2024). A step is filled in this order:

1. Every decoding sequence gets its next token. If that needs a block and none is free, the running sequence
  with the worst priority that arrived last is preempted: it releases its blocks and waits again; its computed
  blocks stay in the prefix cache until their memory is needed. Drafts use what is left, or half of it if
  prompts wait.
2. Prompts in progress, then waiting ones in the order of `queue.py`, get the rest. A prompt longer than the
  step leaves half of it to others, so that short prompts overtake a long one.

`Scheduler` decides which sequences run; `Running` allocates and releases their blocks.

A step is recorded in two parts: `advance` counts its positions, `fill` writes the sampled tokens. `schedule`
needs counts only, so the next step can be scheduled and launched while one step is in flight: advanced and
not filled.

    schedule n+1, launch n+1, read n, fill n, advance n+1, schedule n+2, ...

A sequence whose last token is in flight finishes in `advance`, by its count. Where `fill` shows that a token
ended an answer, the next step has a surplus position of that sequence. It writes into a block that the
sequence had, it is never advanced, so no block is hashed with it, and later users of the block write after
it.

Liveness: the running sequence that is first by (priority, id) always has a share, because it is preempted
last and no request is accepted that would not fit alone. Each share of it advances it, so it finishes, and
the next one is first. The first waiting sequence is admitted before any other, at the latest when all running
ones have finished. A step in flight changes none of this: it holds no blocks of its own, and a sequence that
it ends has at most one share more.

Blocks for all known tokens are allocated on admission, so a prompt never stops half-way for lack of blocks;
later a sequence allocates one whenever its last block is full. In a cache group with a window (groups.py) a
prompt allocates for each share, and releases what no later token sees. An admission leaves free what the
prompts in progress will hold at most, and a share has at most `chunk_tokens` positions, so that this is
little. If others took those blocks, a prompt preempts as a decoding sequence does.

Rejected: swapping blocks to memory (on CPUs they are there, on GPUs recomputation is often as fast); ageing
of priorities (background work would become foreground under load); admitting a request past one that does
not fit (long prompts would wait for ever); a radix tree for prefixes (hashes find the same blocks).
"""

import heapq
from bisect import bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.core.errors import UsageError
from penstock.engine.request import Finish, Request
from penstock.engine.scheduling.blocks import BlockPool, Prefix, check, find_prefix, name_blocks
from penstock.engine.scheduling.budget import StepBudget, StepSize
from penstock.engine.scheduling.groups import blocks_of, first_block, max_blocks
from penstock.engine.scheduling.queue import PROMPT_WEIGHT, SAMPLED_WEIGHT, Siblings, WaitingQueue
from penstock.engine.scheduling.sequence import BlockTable, ScheduledTokens, Sequence, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Limits of a step."""

    max_sequences: int
    """Maximum running sequences."""
    tokens_per_step: int
    """Maximum positions per step, drafts included; also a limit on running sequences: each has one or
    more."""
    block_size: int
    """Positions per block."""
    windows: tuple[int | None, ...] = (None,)
    """Attention window of each cache group (groups.py); None: a token sees all before it."""


@dataclass(slots=True, kw_only=True)
class SchedulerCounters:
    """Totals since the start."""

    num_preempted: int = 0
    """Preemptions."""
    num_asked: int = 0
    """Tokens of admitted sequences: prefix cache lookups."""
    num_found: int = 0
    """Tokens of admitted sequences found in the prefix cache."""


class Scheduler:
    """Continuous batching: call `schedule`, compute, sample, `commit`; add, cancel and finish in between.

    Where tokens are read late, call `advance` in place of `commit`, and `fill` after the next `schedule`.

    Args:
        size: computes the size of a step; None: always `tokens_per_step`.
    """

    def __init__(self, limits: StepLimits, pool: BlockPool, *, size: StepSize | None = None) -> None:
        self.limits = limits
        self.pool = pool
        self.counts = SchedulerCounters()
        self.waiting = WaitingQueue()
        """Sequences not admitted yet, or preempted; read only."""
        self._size = size
        self._chunk_tokens = limits.tokens_per_step if size is None else size.chunk_tokens
        self._siblings = Siblings()
        self._alive: dict[int, Sequence] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._has_windows = any(window is not None for window in limits.windows)
        self._running = Running(
            pool,
            block_size=limits.block_size,
            most=min(limits.max_sequences, limits.tokens_per_step),
            windows=limits.windows,
            share_tokens=self._chunk_tokens,
        )

    @property
    def has_work(self) -> bool:
        """True if any sequence is unfinished."""
        return bool(self._alive)

    @property
    def running(self) -> list[Sequence]:
        """Running sequences (those with blocks), by (priority, id); read only."""
        return self._running.sequences

    @property
    def alive(self) -> Iterable[Sequence]:
        """Unfinished sequences, waiting ones included."""
        return self._alive.values()

    @property
    def num_waiting(self) -> int:
        """Unfinished sequences that do not run. Thread-safe."""
        return len(self._alive) - len(self.running)

    def check_fits(self, request: Request) -> None:
        """Raise for a request that would not fit into an empty cache. Thread-safe.

        Raises:
            UsageError: the request needs more blocks than the cache has.
        """
        most, blocks_of = len(request.prompt) + request.max_tokens, self._running.blocks_of
        if blocks_of(most) > self.pool.num_blocks:
            room = bisect_right(range(most), self.pool.num_blocks, key=blocks_of) - 1
            raise UsageError(
                f"Prompt and answer need {most:,} positions of the cache, which has {room:,}",
                got=most,
                fix="Shorten the prompt, ask for fewer tokens, or give the cache more memory.",
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; the answers of a request are added in order.

        Raises:
            UsageError: as in `check_fits`.
        """
        request = sequence.request
        self.check_fits(request)
        self._alive[sequence.id] = sequence
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, sequence.id))
        if not self._siblings.holds(sequence):
            self.waiting.put(sequence)

    def cancel(self, sequence_id: int, finish: Finish = "cancelled") -> None:
        """Finish a sequence unless it has finished; its blocks are free at once."""
        if (sequence := self._alive.get(sequence_id)) is not None:
            self.finish(sequence, finish)

    def finish(self, sequence: Sequence, finish: Finish) -> None:
        """Finish a sequence; ignored for a finished one."""
        if sequence.finish is not None:
            return
        sequence.finish = finish
        del self._alive[sequence.id]
        if self._siblings.remove(sequence):
            return
        if sequence.tables:
            if finish == "error":
                for table in sequence.tables:
                    self.pool.forget(table.held)
            self._running.leave(sequence)
        else:
            self.waiting.remove(sequence)
        if (heir := self._siblings.successor_of(sequence)) is not None:
            self.waiting.put(heir)

    def expires(self, now_s: float) -> bool:
        """Return True if `schedule` would look at deadlines."""
        return bool(self._deadlines) and self._deadlines[0][0] <= now_s

    def schedule(self, now_s: float) -> StepPlan:
        """Return the plan of the next step, with blocks allocated. Call `commit` or `advance` before the next
        `schedule`."""
        expired = self._expire(now_s)
        decoding = [s for s in self.running if len(s.tokens) - s.num_computed == 1]
        num_prompts = len(self.running) - len(decoding) + len(self.waiting)
        step = StepBudget(
            self._tokens_of_step(decoding, num_prompts),
            chunk_tokens=self._chunk_tokens,
            share_tokens=self._chunk_tokens if self._has_windows else None,
        )
        preempted_before = self.counts.num_preempted
        self._decode(step, decoding, for_prompts=num_prompts > 0)
        if num_prompts:
            self._fill(step)
            if self.counts.num_preempted == preempted_before:
                self._admit(step)
            step.top_up()
            if self._has_windows:
                self._cover(step)
        return StepPlan(shares=step.shares(), expired=expired)

    def commit(
        self, plan: StepPlan, sampled: Iterable[Iterable[int]], *, seconds: float | None = None
    ) -> None:
        """Record a computed step whose tokens are known; arguments as in `fill`."""
        self.advance(plan)
        self.fill(plan, sampled, seconds=seconds)

    def advance(self, plan: StepPlan) -> None:
        """Count the positions of a step; those of sequences that finished since it was scheduled are dropped.

        Drafts count as rejected until `fill`.
        """
        row = 0
        for share in plan.shares:
            if share.sequence.finish is None:
                self._advance(share, row)
            row += share.num_rows

    def fill(self, plan: StepPlan, sampled: Iterable[Iterable[int]], *, seconds: float | None = None) -> None:
        """Write the tokens of an advanced step; those of sequences that were not advanced are dropped.

        Args:
            sampled: per share that samples, in order: the accepted drafts and one more token.
            seconds: time of the step; None: not representative.
        """
        if self._size is not None and seconds is not None:
            self._size.record_step(seconds, num_tokens=plan.num_tokens, with_prompts=plan.has_prompts)
        for share, tokens in zip((s for s in plan.shares if s.samples), sampled, strict=True):
            if share.sequence.tokens[-1] < 0 and (new := list(tokens)):
                self._fill_in(share, new)

    def check(self) -> None:
        """Assert the scheduler's invariants; for tests, in time linear in the number of blocks."""
        check(self.pool, self.running, self.waiting, block_size=self.limits.block_size)
        assert len(self.running) <= self._running.most, len(self.running)
        assert len(self.running) + len(self.waiting) + len(self._siblings) == len(self._alive)

    def _advance(self, share: ScheduledTokens, row: int) -> None:
        sequence = share.sequence
        # keys and values of rejected drafts are overwritten when their positions are computed again
        sequence.num_computed = share.start + share.num_tokens - len(share.drafts)
        sequence.drafts = ()
        if share.samples:
            sequence.tokens.append(~row)
            self.waiting.charge(sequence, SAMPLED_WEIGHT)
        self._computed(sequence, since=share.start)
        if sequence.num_computed >= sequence.num_prompt:
            for sibling in self._siblings.computed(sequence):
                self.waiting.put(sibling)
            if sequence.request.task != "generate":
                self.finish(sequence, "stop")
        self._finish_full(sequence)

    def _fill_in(self, share: ScheduledTokens, new: list[int]) -> None:
        sequence = share.sequence
        assert len(new) <= 1 + len(share.drafts), (share, new)
        sequence.tokens[-1:] = new
        if len(new) > 1 and sequence.finish is None:
            since = sequence.num_computed
            sequence.num_computed += len(new) - 1
            self.waiting.charge(sequence, SAMPLED_WEIGHT * (len(new) - 1))
            self._computed(sequence, since=since)
            self._finish_full(sequence)

    def _computed(self, sequence: Sequence, *, since: int) -> None:
        """Hash the blocks that became full, and release those that no later token sees."""
        name_blocks(self.pool, sequence, block_size=self.limits.block_size, since=since)
        if self._has_windows:
            self._running.release_unseen(sequence)

    def _finish_full(self, sequence: Sequence) -> None:
        if sequence.request.task == "generate" and sequence.num_sampled >= sequence.request.max_tokens:
            self.finish(sequence, "length")

    def _expire(self, now_s: float) -> tuple[Sequence, ...]:
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, sequence_id = heapq.heappop(self._deadlines)
            if (sequence := self._alive.get(sequence_id)) is not None:
                self.finish(sequence, "deadline")
                expired.append(sequence)
        return tuple(expired)

    def _tokens_of_step(self, decoding: list[Sequence], num_prompts: int) -> int:
        if self._size is None or not num_prompts:
            return self.limits.tokens_per_step
        return self._size.tokens(
            decoding=sum(1 + len(s.drafts) for s in decoding),
            num_prompts=num_prompts,
            queued=self.waiting.num_tokens,
        )

    def _decode(self, step: StepBudget, decoding: list[Sequence], *, for_prompts: bool) -> None:
        spare = step.left - len(decoding)
        if for_prompts:
            spare //= 2
        # next tokens before drafts: a draft must not cause a preemption
        for sequence in [s for s in decoding if self._grow(s, step)]:
            num_drafts = self._room_for_drafts(sequence, spare)
            step.give(sequence, 1 + num_drafts)
            spare -= num_drafts

    def _cover(self, step: StepBudget) -> None:
        """Allocate the blocks of all shares, better priorities first."""
        for sequence in [s for s in self.running if s in step.runs]:
            self._grow(sequence, step, end=sequence.num_computed + step.runs.get(sequence, 0))

    def _grow(self, sequence: Sequence, step: StepBudget, *, end: int | None = None) -> bool:
        """Allocate blocks up to position `end`, preempting others if needed; None: for the next position.

        Returns:
            False: `sequence` was preempted.
        """
        if not sequence.tables:
            return False
        end = len(sequence.tokens) if end is None else end
        if missing := self._running.missing(sequence, end):
            while missing > self.pool.num_free:
                victim = self.running[-1]
                self._preempt(victim, step)
                if victim is sequence:
                    return False
            self._running.grow(sequence, end)
        return True

    def _room_for_drafts(self, sequence: Sequence, spare: int) -> int:
        """Return how many drafts are verified, allocating free blocks for them without preemption."""
        if not sequence.drafts:
            return 0
        still_wanted = sequence.request.max_tokens - sequence.num_sampled - 1
        return self._running.extend(sequence, min(len(sequence.drafts), spare, still_wanted))

    def _fill(self, step: StepBudget) -> None:
        filling = [s for s in self.running if s not in step.runs]
        for place, sequence in enumerate(filling, start=1):
            step.give_chunk(sequence, is_last=place == len(filling) and not len(self.waiting))

    def _admit(self, step: StepBudget) -> None:
        while (sequence := self.waiting.peek()) is not None and step.room(sequence) > 0:
            found = self._make_room(sequence, step)
            if found is None:
                return
            self._start(sequence, found)
            step.give_chunk(sequence, is_last=not len(self.waiting))

    def _make_room(self, sequence: Sequence, step: StepBudget) -> Prefix | None:
        """Preempt worse priorities until a waiting sequence fits; None: it does not fit.

        Returns:
            The cached blocks of its prefix; looked up again after each preemption, which may evict some.
        """
        while True:
            found = find_prefix(
                self.pool, sequence, block_size=self.limits.block_size, windows=self.limits.windows
            )
            if self._running.fits(sequence, found):
                return found
            victim = self.running[-1] if self.running else None
            if victim is None or victim.request.priority <= sequence.request.priority:
                return None
            self._preempt(victim, step)

    def _start(self, sequence: Sequence, found: Prefix) -> None:
        self.waiting.remove(sequence)
        self._running.enter(sequence, found)
        self.counts.num_asked += len(sequence.tokens)
        self.counts.num_found += sequence.num_computed
        if not sequence.admitted:
            sequence.admitted = True
            sequence.num_cached = sequence.num_computed
            self.waiting.charge(sequence, PROMPT_WEIGHT * (sequence.num_prompt - sequence.num_cached))

    def _preempt(self, victim: Sequence, step: StepBudget) -> None:
        self.counts.num_preempted += 1
        self._running.leave(victim)
        step.take_back(victim)
        victim.num_computed, victim.drafts = 0, ()
        self.waiting.put(victim)


class Running:
    """Running sequences and their blocks; equal blocks are shared.

    Args:
        most: maximum number of running sequences.
        windows: of each cache group.
        share_tokens: maximum positions of a prompt's share, if there are windows.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        most: int,
        windows: tuple[int | None, ...] = (None,),
        share_tokens: int = 1,
    ) -> None:
        self.sequences: list[Sequence] = []
        """Ordered by (priority, id); the last one is preempted first."""
        self.most = most
        self._pool = pool
        self._block_size = block_size
        self._windows, self._share_tokens = windows, share_tokens
        self._max_blocks = [
            max_blocks(window, block_size=block_size, share_tokens=share_tokens) for window in windows
        ]

    def blocks_of(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` holds at a time."""
        return blocks_of(
            num_tokens, self._windows, block_size=self._block_size, share_tokens=self._share_tokens
        )

    def fits(self, sequence: Sequence, found: Prefix) -> bool:
        """Return True if a sequence can be admitted that shares the blocks `found`.

        One free block per running sequence and group is kept back, and what prompts in progress will hold, so
        that an admission does not cause preemptions.
        """
        if len(self.sequences) >= self.most:
            return False
        needed = len(self.sequences) * len(self._windows) + self._reserved()
        new = -(-len(sequence.tokens) // self._block_size) - found.num_blocks
        for blocks, most in zip(found.blocks, self._max_blocks, strict=True):
            taken = new + sum(not self._pool.users(block) for block in blocks)
            needed += taken if most is None else min(taken, most)
        return needed <= self._pool.num_free

    def _reserved(self) -> int:
        """Return the blocks that prompts in progress will hold beyond those that they hold now, at most."""
        reserved = 0
        for group, most in enumerate(self._max_blocks):
            if most is None:  # all blocks are allocated on admission
                continue
            for sequence in self.sequences:
                table = sequence.tables[group]
                missing = -(-len(sequence.tokens) // self._block_size) - len(table.blocks)
                reserved += max(0, min(missing, most - len(table.blocks) + table.num_released))
        return reserved

    def enter(self, sequence: Sequence, found: Prefix) -> None:
        """Admit a sequence: share the cached blocks of its prefix, and allocate the others in groups without
        a window; `fits` must hold."""
        insort(self.sequences, sequence, key=_order)
        sequence.tables = tuple(BlockTable() for _ in self._windows)
        for table, blocks in zip(sequence.tables, found.blocks, strict=True):
            table.num_released = found.num_blocks - len(blocks)
            table.blocks.extend([0] * table.num_released)
            for block in blocks:
                self._pool.share(block)
            table.blocks.extend(blocks)
        sequence.num_computed = found.num_blocks * self._block_size
        for table, window in zip(sequence.tables, self._windows, strict=True):
            if window is None:
                self._extend(table, len(sequence.tokens))

    def leave(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence; full ones stay in the prefix cache until their memory is
        needed."""
        self.sequences.remove(sequence)
        for table in sequence.tables:
            self._pool.release(table.held)
        sequence.tables = ()

    def missing(self, sequence: Sequence, end: int) -> int:
        """Return the number of blocks that `grow` would allocate."""
        whole, missing = -(-end // self._block_size), 0
        for table in sequence.tables:  # a sum of a generator takes twice as long, once a sequence and step
            if len(table.blocks) < whole:
                missing += whole - len(table.blocks)
        return missing

    def grow(self, sequence: Sequence, end: int) -> None:
        """Allocate blocks for the positions before `end`; there must be free ones."""
        for table in sequence.tables:
            self._extend(table, end)

    def extend(self, sequence: Sequence, num_positions: int) -> int:
        """Allocate free blocks for up to `num_positions` after the known tokens; return how many fit."""
        length, spare = len(sequence.tokens), self._pool.num_free - self._reserved()
        covered = min(len(table.blocks) for table in sequence.tables) * self._block_size
        while covered < length + num_positions and (new := self.missing(sequence, covered + 1)) <= spare:
            self.grow(sequence, covered + 1)
            spare -= new
            covered += self._block_size
        return max(0, min(num_positions, covered - length))

    def release_unseen(self, sequence: Sequence) -> None:
        """Release the blocks that no later token sees; they stay in the prefix cache."""
        for table, window in zip(sequence.tables, self._windows, strict=True):
            first = first_block(sequence.num_computed, window, self._block_size)
            if first > table.num_released:
                self._pool.release(table.blocks[table.num_released : first])
                table.num_released = first

    def _extend(self, table: BlockTable, end: int) -> None:
        for _ in range(-(-end // self._block_size) - len(table.blocks)):
            table.blocks.append(self._pool.take())


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.priority, sequence.id
