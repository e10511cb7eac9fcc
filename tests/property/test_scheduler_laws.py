"""Any order of adding, cancelling, guessing and computing: every answer is what its prompt alone gives."""

import random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.engine.request import Request
from penstock.engine.scheduling.blocks import BlockPool
from penstock.engine.scheduling.budget import StepSize
from penstock.engine.scheduling.scheduler import Scheduler, StepLimits
from tests.examples import examples
from tests.hashing_model import HashingModel, answer_of, finish_full, run_plan, run_to_end, sequences_of

BLOCK_SIZE, BUDGET, PIECE = 4, 10, 6


def prompt_of(kind, length):
    """Prompts of one kind begin alike; those of kinds 0 and 1 go on alike after another first token."""
    return tuple(kind if i == 0 or (kind > 1 and i > 5) else 10 + i for i in range(length))


def request_of(*, prompt, task, num_scored, **settings):
    """A request; one that scores has a continuation that its prompt holds, but for the last token."""
    continuations = [(*prompt[len(prompt) - count + 1 :], 7) for count in num_scored if count <= len(prompt)]
    return Request(
        prompt=prompt, task=task, continuations=tuple(continuations) if task == "score" else (), **settings
    )


prompts = st.builds(prompt_of, st.integers(0, 3), st.integers(1, 30))
requests = st.builds(
    request_of,
    prompt=prompts,
    max_tokens=st.integers(1, 16),
    num_answers=st.sampled_from([1, 1, 1, 3]),
    priority=st.sampled_from([0, 0, 1, 2]),
    client=st.sampled_from(["x", "y", "z"]),
    adapter=st.sampled_from([None, None, "a", "b"]),
    num_prompt_logprobs=st.sampled_from([None, None, None, 0]),
    task=st.sampled_from(["generate", "generate", "generate", "generate", "embed", "score"]),
    num_scored=st.lists(st.integers(1, 12), max_size=2),
    deadline_s=st.sampled_from([None, None, None, 5.0, 20.0]),
)


class Schedules(RuleBasedStateMachine):
    windows = (None,)
    num_blocks = 12

    def __init__(self):
        super().__init__()
        pool = BlockPool(self.num_blocks)
        limits = StepLimits(
            max_sequences=5, tokens_per_step=BUDGET, block_size=BLOCK_SIZE, windows=self.windows
        )
        size = StepSize(target_s=0.05, chunk_tokens=PIECE, most=BUDGET)
        self.scheduler = Scheduler(limits, pool, size=size)
        self.model = HashingModel(num_blocks=self.num_blocks, block_size=BLOCK_SIZE, windows=self.windows)
        self.sequences = []
        self.now_s = 0.0

    @rule(request=requests)
    def add(self, request):
        for sequence in sequences_of(request, first_id=len(self.sequences)):
            self.scheduler.add(sequence)
            self.sequences.append(sequence)

    @rule(place=st.integers(0, 10**6))
    def cancel(self, place):
        if self.sequences:
            self.scheduler.cancel(place % len(self.sequences))

    @rule(seed=st.integers(0, 10**6))
    def guess(self, seed):
        chance = random.Random(seed)
        for sequence in self.scheduler.running:
            right = answer_of(sequence.request)[sequence.num_sampled :][: chance.randint(0, 5)]
            wrong = [0] * chance.randint(0, 2)
            if sequence.num_computed == len(sequence.tokens) - 1 and sequence.num_sampled:
                sequence.drafts = (*right, *wrong)

    @rule(
        cancelled=st.none() | st.integers(0, 10**6),
        waited_s=st.integers(0, 2),
        took_s=st.sampled_from([None, 0.0, 1e-4, 0.01, 0.03, 0.2, 5.0]),
    )
    def step(self, cancelled, waited_s, took_s):
        self.now_s += waited_s
        plan = self.scheduler.schedule(self.now_s)
        assert plan.num_tokens <= BUDGET
        assert bool(plan.shares) == self.scheduler.has_work
        assert sum(len(share.scored) for share in plan.shares) <= PIECE
        self.the_first_has_a_share(plan)
        sizes = [share.num_tokens for share in plan.shares]
        assert sizes == sorted(sizes, key=lambda size: size > 1)
        drawn = run_plan(self.model, plan, BLOCK_SIZE)
        if cancelled is not None:
            self.cancel(cancelled)
        self.scheduler.commit(plan, drawn, seconds=took_s)
        finish_full(self.scheduler, plan)

    def the_first_has_a_share(self, plan):
        if self.scheduler.running:
            assert self.scheduler.running[0] in [share.sequence for share in plan.shares]

    @invariant()
    def consistent(self):
        self.scheduler.check()
        for sequence in self.sequences:
            if sequence.request.task == "generate":
                right = answer_of(sequence.request)
                assert sequence.tokens[sequence.num_prompt :] == right[: sequence.num_sampled]

    def teardown(self):
        for sequence in self.scheduler.running:
            sequence.drafts = ()
        run_to_end(self.scheduler, self.model)
        assert self.scheduler.pool.num_used == 0
        for sequence in self.sequences:
            assert sequence.finish is not None
            if sequence.finish == "length":
                assert sequence.num_sampled == sequence.request.max_tokens


class WindowedSchedules(Schedules):
    windows = (7,)

    @invariant()
    def what_the_next_token_sees_is_there_and_no_more(self):
        for sequence in self.scheduler.running:
            for table, window in zip(sequence.tables, self.windows, strict=True):
                first_seen = 0 if window is None else max(0, sequence.num_computed - (window - 1))
                assert table.num_released == first_seen // BLOCK_SIZE
                wanted = len(sequence.tokens) + BUDGET  # drafts
                if window is not None:
                    wanted = min(wanted, window - 1 + max(PIECE, 1 + BUDGET))
                assert len(table.held) <= (wanted + 2 * BLOCK_SIZE - 2) // BLOCK_SIZE


class SchedulesOfGroups(WindowedSchedules):
    windows = (7, 7, None)
    num_blocks = 26


class SchedulesOfWindows(WindowedSchedules):
    windows = (3, 12)
    num_blocks = 14


Schedules.TestCase.settings = examples(60, stateful_step_count=40)
test_any_schedule = Schedules.TestCase
WindowedSchedules.TestCase.settings = Schedules.TestCase.settings
test_any_schedule_where_tokens_see_a_window = WindowedSchedules.TestCase
SchedulesOfGroups.TestCase.settings = Schedules.TestCase.settings
test_any_schedule_of_groups = SchedulesOfGroups.TestCase
SchedulesOfWindows.TestCase.settings = Schedules.TestCase.settings
test_any_schedule_of_groups_with_windows = SchedulesOfWindows.TestCase
