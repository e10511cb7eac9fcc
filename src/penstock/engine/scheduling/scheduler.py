"""Which sequences compute which of their tokens in a step: the policy of the engine; integers only.

There is one kind of work: a sequence has tokens, of which some are computed. A decode is a share of one
token (and drafts), a piece of a prompt a share of many, and both are in one step (Orca, OSDI 2022;
Sarathi-Serve, OSDI 2024). A step is filled in this order:

1. Every sequence that has one token left gets it. If a block is needed and none is free, the running
   sequence of the worst priority that came last gives up its blocks and waits again; what it had computed
   stays findable until its room is needed. Drafts take what is left, or half of it if prompts want some.
2. Prompts that were begun, then those whose turn it is (`fairness.py`), get the rest. One that is
   longer than a step leaves half of it to others, so that short prompts pass a long one.

Here is who; how a sequence gets and gives back its blocks is in `engine.scheduling.running`.

Nothing waits for ever. The running sequence that comes first by (priority, id) always has a share: it is the
last to be pre-empted, and no request is accepted that would not fit alone. So it ends, and the next is first.
Who waits first is admitted before any other, and at the latest when all others have ended.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.core.errors import UsageError
from penstock.engine.request import Finish, Request
from penstock.engine.scheduling.blocks import BlockPool
from penstock.engine.scheduling.fairness import DRAWN_WEIGHT, PROMPT_WEIGHT, WaitingLine
from penstock.engine.scheduling.invariants import check
from penstock.engine.scheduling.prefix import find_prefix, name_blocks
from penstock.engine.scheduling.running import Running
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.siblings import Siblings
from penstock.engine.scheduling.step_budget import StepBudget
from penstock.engine.scheduling.step_plan import Share, StepPlan
from penstock.engine.scheduling.step_size import StepSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a step may hold."""

    max_sequences: int
    """Running at once."""
    tokens_per_step: int
    """Positions computed in a step, drafts included; also a limit on sequences: each has one at least."""
    block_size: int
    """Positions of a block."""
    window: int | None = None
    """A token sees itself and the `window - 1` before it, in any layer; None: some layer sees all."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """What happened so far."""

    num_preempted: int = 0
    """Times that a running sequence gave up its blocks."""
    num_asked: int = 0
    """Tokens of admitted sequences that could have been found computed."""
    num_found: int = 0
    """Tokens of admitted sequences that were found computed."""


class Scheduler:
    """Call `schedule`, compute, draw, `commit`; add, cancel and finish at any time between these.

    Args:
        size: how much of `tokens_per_step` a step uses; None: all of it, if there is work.
    """

    def __init__(self, limits: Limits, pool: BlockPool, *, size: StepSize | None = None) -> None:
        self.limits = limits
        self.pool = pool
        self.counts = Counts()
        self.waiting = WaitingLine()
        """Not admitted yet or pre-empted; read only."""
        self._size = size
        self._piece = limits.tokens_per_step if size is None else size.piece
        self._siblings = Siblings()
        self._alive: dict[int, Sequence] = {}
        self._deadlines: list[tuple[float, int]] = []
        most = min(limits.max_sequences, limits.tokens_per_step)
        self._running = Running(pool, block_size=limits.block_size, most=most)

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended."""
        return bool(self._alive)

    @property
    def running(self) -> list[Sequence]:
        """Those that hold blocks, by (priority, id); read only."""
        return self._running.sequences

    @property
    def alive(self) -> Iterable[Sequence]:
        """Sequences that have not ended, waiting ones included."""
        return self._alive.values()

    def check_fits(self, request: Request) -> None:
        """Refuse what could not be computed if nothing else were there; for any thread.

        Raises:
            UsageError: it needs more blocks than there are.
        """
        most = len(request.prompt) + request.max_tokens
        room = self.pool.num_blocks * self.limits.block_size
        if self._running.blocks_of(most) > self.pool.num_blocks:
            raise UsageError(
                f"Prompt and answer need {most:,} positions of the cache, which has {room:,}",
                got=most,
                fix="Shorten the prompt, ask for fewer tokens, or give the cache more memory.",
            )

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn; a request's answers are added in their order.

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
        """End a sequence if it has not ended; its blocks are free at once."""
        if (sequence := self._alive.get(sequence_id)) is not None:
            self.finish(sequence, finish)

    def finish(self, sequence: Sequence, finish: Finish) -> None:
        """End a sequence; nothing happens to one that has ended."""
        if sequence.finish is not None:
            return
        sequence.finish = finish
        del self._alive[sequence.id]
        if self._siblings.remove(sequence):
            return
        if sequence.blocks:
            self._running.leave(sequence)
        else:
            self.waiting.remove(sequence)
        if (heir := self._siblings.heir_of(sequence)) is not None:
            self.waiting.put(heir)

    def schedule(self, now_s: float) -> StepPlan:
        """Return the next step; its sequences have blocks for it. Commit it before the next."""
        expired = self._expire(now_s)
        decoding = [s for s in self.running if len(s.tokens) - s.num_computed == 1]
        num_prompts = len(self.running) - len(decoding) + len(self.waiting)
        step = StepBudget(self._tokens_of_step(decoding, num_prompts), piece=self._piece)
        preempted_before = self.counts.num_preempted
        self._decode(step, decoding, for_prompts=num_prompts > 0)
        if num_prompts:
            self._fill(step)
            if self.counts.num_preempted == preempted_before:
                self._admit(step)
            step.top_up()
        return StepPlan(shares=step.shares(), expired=expired)

    def commit(self, plan: StepPlan, drawn: Iterable[Iterable[int]], *, seconds: float | None = None) -> None:
        """Take note of a computed step.

        Args:
            drawn: for each share that samples, in order: the drafts that were accepted and one more
                token. What was drawn for a sequence that ended meanwhile is dropped.
            seconds: what computing it took; None: that says nothing about others.
        """
        if self._size is not None and seconds is not None:
            self._size.step_took(seconds, num_tokens=plan.num_tokens, with_prompts=plan.has_prompts)
        tokens = iter(drawn)
        for share in plan.shares:
            new = list(next(tokens)) if share.samples else []
            if share.sequence.finish is None:
                self._advance(share, new)

    def check(self) -> None:
        """Assert what always holds between two calls; for tests, it looks at everything."""
        check(self.pool, self.running, self.waiting, block_size=self.limits.block_size)
        assert len(self.running) <= self._running.most, len(self.running)
        assert len(self.running) + len(self.waiting) + len(self._siblings) == len(self._alive)

    def _advance(self, share: Share, new: list[int]) -> None:
        sequence = share.sequence
        assert bool(new) == share.samples, (share, new)
        assert len(new) <= 1 + len(share.drafts), (share, new)
        # keys and values of rejected drafts are overwritten when their positions come again
        known = share.num_tokens - len(share.drafts)
        sequence.num_computed = share.start + known + max(0, len(new) - 1)
        sequence.tokens += new
        sequence.drafts = ()
        if new:
            self.waiting.charge(sequence, DRAWN_WEIGHT * len(new))
        name_blocks(self.pool, sequence, block_size=self.limits.block_size, since=share.start)
        if self.limits.window is not None:
            self._running.leave_behind(sequence, sequence.num_computed + 1 - self.limits.window)
        if sequence.num_computed >= sequence.num_prompt:
            for sibling in self._siblings.computed(sequence):
                self.waiting.put(sibling)
            if sequence.request.task == "embed":
                self.finish(sequence, "stop")

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
        # all next tokens before any draft: a guess shall not drive a sequence out
        for sequence in [s for s in decoding if self._grow(s, step)]:
            num_drafts = self._room_for_drafts(sequence, spare)
            step.give(sequence, 1 + num_drafts)
            spare -= num_drafts

    def _grow(self, sequence: Sequence, step: StepBudget) -> bool:
        """Give a sequence the block of its next position, whatever it takes; False: it was pre-empted."""
        if not sequence.blocks:
            return False
        if self._running.is_full(sequence):
            while not self.pool.num_free:
                victim = self.running[-1]
                self._preempt(victim, step)
                if victim is sequence:
                    return False
            self._running.grow(sequence)
        return True

    def _room_for_drafts(self, sequence: Sequence, spare: int) -> int:
        """Return how many drafts are verified, and take free blocks for them, but nobody's."""
        if not sequence.drafts:
            return 0
        still_wanted = sequence.request.max_tokens - sequence.num_drawn - 1
        return self._running.stretch(sequence, min(len(sequence.drafts), spare, still_wanted))

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

    def _make_room(self, sequence: Sequence, step: StepBudget) -> list[int] | None:
        """Pre-empt what has a worse priority until a waiting sequence fits; None: it does not.

        Returns:
            The blocks that hold its beginning: looked for anew, as who made way may have held some.
        """
        while True:
            found = find_prefix(self.pool, sequence, block_size=self.limits.block_size)
            if self._running.fits(sequence, found):
                return found
            victim = self.running[-1] if self.running else None
            if victim is None or victim.request.priority <= sequence.request.priority:
                return None
            self._preempt(victim, step)

    def _start(self, sequence: Sequence, found: list[int]) -> None:
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
