"""A stand-in for a network: what it keeps in the cache, and draws, is a hash of all tokens so far.

It is given nothing but a step's arrays, as a real one: each position reads the one before it out of the
cache. So one wrong block, slot or position changes every token that follows.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from penstock.engine.model_runner.batch import StepBatch, batch_of
from penstock.engine.request import Request
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.sequence import Sequence as Tokens
from penstock.engine.scheduling.sequence import StepPlan

VOCAB = 1000
ADAPTERS = {"a": 0, "b": 1}


def step_hash(before: int, token: int) -> int:
    """The state after one more token."""
    return hash((before, token))


def answer_of(request: Request) -> list[int]:
    """What the answer of a request is, computed without a cache."""
    state = ADAPTERS.get(request.adapter or "", -1)
    for token in request.prompt:
        state = step_hash(state, token)
    tokens = []
    for _ in range(request.max_tokens):
        tokens.append(state % VOCAB)
        state = step_hash(state, tokens[-1])
    return tokens


class HashingModel:
    """Runs batches over a cache of so many slots, which all cache groups write to, each to its own.

    Args:
        windows: of each group: so many positions, a share's first token included, have to be one another's
            successors; None: all.
    """

    def __init__(self, *, num_blocks: int, block_size: int, windows: Sequence[int | None] = (2,)) -> None:
        self._block_size = block_size
        self._windows = windows
        self._cache: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)  # state, token

    def run(self, batch: StepBatch) -> list[int]:
        """Return the likeliest token at each of the rows asked for."""
        states = []
        for share in range(len(batch.lengths)):
            tables = batch.block_tables[:, share]
            assert len(tables) == len(self._windows)
            for t in range(batch.query_starts[share], batch.query_starts[share + 1]):
                position = int(batch.positions[t])
                before = int(batch.adapters[share])
                if position:
                    (before,) = {self._kept(table, position - 1)[0] for table in tables}
                token = int(batch.token_ids[t])
                states.append(step_hash(before, token))
                for slot in batch.slots[:, t]:
                    self._cache[slot] = states[-1], token
            for table, window in zip(tables, self._windows, strict=True):
                self._check_window(table, int(batch.positions[batch.query_starts[share]]), window)
            assert batch.lengths[share] == position + 1
        return [states[row] % VOCAB for row in batch.logit_rows]

    def _check_window(self, table: np.ndarray, position: int, window: int | None) -> None:
        for seen in range(0 if window is None else max(0, position - window + 1), position):
            state, token = self._kept(table, seen + 1)
            assert state == step_hash(self._kept(table, seen)[0], token), (seen, position)

    def _kept(self, table: np.ndarray, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self._block_size)
        kept = self._cache[table[block] * self._block_size + offset]
        assert kept is not None, position
        return kept


def run_plan(model: HashingModel, plan: StepPlan, block_size: int) -> list[list[int]]:
    """Compute a plan; return for each share that samples its accepted drafts and one more token."""
    if not plan.shares:
        return []
    rows = iter(model.run(batch_of(plan, block_size, adapters=ADAPTERS)))
    drawn = []
    for share in plan.shares:
        for _ in share.scored:  # rows that are wanted to score the prompt come first
            next(rows)
        if share.samples:
            drawn.append(_accepted(share.drafts, rows))
    return drawn


def _accepted(drafts: Iterable[int], rows: Iterable[int]) -> list[int]:
    rows = iter(rows)
    tokens = [next(rows)]
    rejected = False
    for draft in drafts:
        following = next(rows)
        rejected = rejected or draft != tokens[-1]
        if not rejected:
            tokens.append(following)
    return tokens


def sequences_of(request: Request, *, first_id: int) -> list[Tokens]:
    """The sequences of a request's answers."""
    return [
        Tokens(
            id=first_id + answer,
            request_id=first_id,
            answer=answer,
            request=request,
            tokens=list(request.prompt),
        )
        for answer in range(request.num_answers)
    ]


def finish_full(scheduler: Scheduler, plan: StepPlan) -> None:
    """End the sequences of a committed plan that have all their tokens."""
    for share in plan.shares:
        if share.sequence.num_sampled >= share.sequence.request.max_tokens:
            scheduler.finish(share.sequence, "length")


def run_to_end(scheduler: Scheduler, model: HashingModel) -> int:
    """Step until every sequence has ended; return the number of steps."""
    steps = 0
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        assert plan.shares, "a step without work though some is left"
        scheduler.commit(plan, run_plan(model, plan, scheduler.limits.block_size))
        finish_full(scheduler, plan)
        scheduler.check()
        steps += 1
        assert steps < 100_000
    return steps
