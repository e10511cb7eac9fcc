"""Steps as long as those who wait for them bear: sizes follow measured times on any machine."""

import pytest

from penstock.engine.request import Request
from penstock.engine.scheduling.blocks import BlockPool
from penstock.engine.scheduling.budget import TOGETHER_S, StepSize
from penstock.engine.scheduling.scheduler import Scheduler, StepLimits
from penstock.engine.scheduling.sequence import Sequence

MACHINES = {  # what a step costs, and each of its tokens, in seconds
    "tokens are all that costs": (0.0, 0.0003),
    "some of both": (0.003, 0.0003),
    "weights are what costs": (0.015, 0.00004),
    "a large model": (0.04, 0.002),
}


class Machine:
    """A step lasts as long as its machine says; the size is told."""

    def __init__(self, cost_s, token_s, *, target_s=0.05, most=4096):
        self.cost_s, self.token_s = cost_s, token_s
        self.size = StepSize(target_s=target_s, chunk_tokens=512, most=most)
        for num_tokens in (16, 1, 16, 512):  # the first are not measured
            self.run(num_tokens, with_prompts=num_tokens > 1)

    def run(self, num_tokens, *, with_prompts=True, slower=1.0):
        seconds = slower * (self.cost_s + num_tokens * self.token_s)
        self.size.record_step(seconds, num_tokens=num_tokens, with_prompts=with_prompts)
        return seconds

    def beside(self, decoding, *, steps=1, queued=0):
        """Compute steps with prompts and answers; return what the last took."""
        for _ in range(steps):
            num_tokens = self.size.tokens(decoding=decoding, num_prompts=1, queued=queued)
            seconds = self.run(num_tokens)
        return seconds


@pytest.fixture(params=MACHINES)
def machine(request):
    return Machine(*MACHINES[request.param])


@pytest.mark.parametrize("decoding", [1, 16, 128])
def test_a_step_beside_answers_lasts_as_long_as_it_may(machine, decoding):
    plain_s = machine.run(decoding, with_prompts=False)
    for _ in range(20):
        machine.run(decoding, with_prompts=False)
    assert machine.beside(decoding, steps=30) == pytest.approx(max(0.05, 2 * plain_s), rel=0.1)


def test_it_is_never_much_longer_on_the_way_there(machine):
    plain_s = machine.run(16, with_prompts=False)
    assert all(machine.beside(16) <= 1.5 * max(0.05, 2 * plain_s) for _ in range(30))


def test_a_machine_that_stood_still_once_is_known_again_soon(machine):
    usual_s = machine.beside(16, steps=30)
    machine.run(200, slower=50)
    assert machine.beside(16, steps=30) == pytest.approx(usual_s, rel=0.1)


def test_a_machine_that_became_slower_gets_smaller_pieces():
    machine = Machine(0.003, 0.0003)
    machine.token_s *= 3
    assert machine.beside(16, steps=20) == pytest.approx(0.05, rel=0.1)


def test_what_queues_up_is_begun_whatever_that_takes(machine):
    size = machine.size.tokens(decoding=16, num_prompts=9, queued=64_000)
    assert 16 + 1000 <= size <= 4096


def test_first_tokens_come_together_where_nobody_is_between_two(machine):
    size = machine.size.tokens(decoding=0, num_prompts=20, queued=20_000)
    assert size == 4096 or machine.run(size) <= 1.2 * TOGETHER_S or size == 512


def test_one_prompt_alone_is_computed_in_pieces(machine):
    assert machine.size.tokens(decoding=0, num_prompts=1, queued=8000) == 512


def test_without_prompts_nothing_is_held_back(machine):
    assert machine.size.tokens(decoding=300, num_prompts=0, queued=0) == 4096


@pytest.mark.parametrize("decoding", [0, 1, 29])
@pytest.mark.parametrize("queued", [0, 10**6])
def test_a_step_is_never_larger_than_it_may_be(machine, decoding, queued):
    machine.size = StepSize(target_s=9.0, chunk_tokens=512, most=30)
    machine.run(8)
    assert decoding < machine.size.tokens(decoding=decoding, num_prompts=2, queued=queued) <= 30


def served(cost_s, *, load, num_requests=300):
    """Return seconds to each first token, and between tokens, where prompts take such a share of the time."""
    token_s, prompt, drawn = 0.0003, 400, 8
    size = StepSize(target_s=0.05, chunk_tokens=512, most=4096)
    limits = StepLimits(max_sequences=64, tokens_per_step=4096, block_size=16)
    scheduler = Scheduler(limits, BlockPool(4000, keep_idle=False), size=size)
    waits, gaps, last, now, arrived = [], [], {}, 0.0, 0
    every_s = prompt * token_s / load
    while scheduler.has_work or arrived < num_requests:
        while arrived < num_requests and (arrived * every_s <= now or not scheduler.has_work):
            now = max(now, arrived * every_s)
            request = Request(prompt=(arrived,) * prompt, max_tokens=drawn)
            scheduler.add(
                Sequence(
                    id=arrived, request_id=arrived, answer=0, request=request, tokens=list(request.prompt)
                )
            )
            arrived += 1
        plan = scheduler.schedule(now)
        seconds = cost_s + token_s * plan.num_tokens
        now += seconds
        drew = [share.sequence for share in plan.shares if share.samples]
        scheduler.commit(plan, [[1]] * len(drew), seconds=seconds)
        for sequence in drew:
            came = last.get(sequence.id)
            waits += [now - sequence.id * every_s] if came is None else []
            gaps += [] if came is None else [now - came]
            last[sequence.id] = now
            if sequence.num_sampled == drawn:
                scheduler.finish(sequence, "length")
    return waits, gaps


def test_while_load_is_small_no_answer_waits_longer_than_it_should():
    _, gaps = served(0.003, load=0.5)
    assert max(gaps) <= 0.06


def test_more_prompts_than_every_other_second_computes_are_served_too():
    waits, gaps = served(0.04, load=0.75)
    step_s = 0.04 / (1 - 0.75)  # what a step has to last, if all are to be served
    assert max(waits) <= 2 * 32 * step_s  # with pieces as long as a step without: 38 s, and growing
    assert max(gaps) <= 4 * step_s


def test_slow_first_steps_are_not_believed():
    size = StepSize(target_s=0.05, chunk_tokens=512, most=4096)
    for seconds in (9.0, 3.0, 1.0, 0.1):
        size.record_step(seconds, num_tokens=500, with_prompts=True)
    assert size.tokens(decoding=1, num_prompts=1, queued=0) == 250


def test_many_more_answers_than_were_ever_in_a_step_leave_room_for_prompts(machine):
    assert machine.size.tokens(decoding=1500, num_prompts=1, queued=0) >= 2800
