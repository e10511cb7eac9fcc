"""The meter: rates of a step, its phases, and what communication took of them."""

import pytest

from penstock.core import clock
from penstock.obs.meter import PHASES, Phases, StepMeter, peak_memory_bytes


class Time:
    """A clock that tests set; also counts the seconds blocked."""

    def __init__(self, monkeypatch):
        self.now, self.blocked = 10.0, 0.0
        monkeypatch.setattr(clock, "monotonic", lambda: self.now)


@pytest.fixture
def time(monkeypatch):
    return Time(monkeypatch)


def meter(time, **options):
    made = StepMeter(
        flops_per_token=lambda length: 6e4 * length,
        peak_flops=1e10,
        phases=Phases(blocked_s=lambda: time.blocked),
        **options,
    )
    made.start()
    return made


def test_rates_are_those_of_the_whole_step(time):
    of_step = meter(time)
    time.now += 2.0
    rates = of_step.finish(rows=10, sequence_length=100)
    assert (rates.step_s, rates.tokens_per_s) == (2.0, 500.0)
    assert rates.mfu == rates.hfu == pytest.approx(500 * 6e6 / 1e10)


def test_what_is_computed_twice_counts_as_work_of_the_hardware_only(time):
    # Forward is a third of the work: all of it again makes four thirds.
    of_step = meter(time, recomputed_share=1.0)
    time.now += 2.0
    rates = of_step.finish(rows=10, sequence_length=100)
    assert rates.hfu == pytest.approx(rates.mfu * 4 / 3)


def test_shares_are_those_of_the_marked_phases_and_the_rest_is_nobodys(time):
    of_step = meter(time)
    for phase, seconds in (
        ("data_wait", 1),
        ("forward", 2),
        ("backward", 3),
        ("forward", 1),
        ("optimizer", 1),
    ):
        time.now += seconds
        of_step.mark(phase)
    time.now += 2
    shares = of_step.finish(rows=1, sequence_length=1).shares
    assert tuple(shares) == PHASES
    assert shares == {
        "data_wait": 0.1, "forward": 0.3, "backward": 0.3, "communication": 0.0, "optimizer": 0.1
    }  # fmt: skip


def test_time_blocked_on_other_ranks_is_moved_from_the_phase_it_fell_in(time):
    of_step = meter(time)
    time.now, time.blocked = time.now + 4, time.blocked + 3
    of_step.mark("forward")
    time.now += 1
    of_step.mark("communication")
    shares = of_step.finish(rows=1, sequence_length=1).shares
    assert (shares["forward"], shares["communication"]) == (0.2, 0.8)


def test_a_step_that_took_no_time_has_finite_rates(time):
    rates = meter(time).finish(rows=10, sequence_length=100)
    assert rates.step_s > 0
    assert rates.tokens_per_s < float("inf")
    assert rates.shares["data_wait"] == 0


def test_each_step_is_timed_from_its_own_start(time):
    of_step = meter(time)
    time.now += 4
    of_step.finish(rows=1, sequence_length=1000)
    time.now += 96
    of_step.start()
    time.now += 1
    assert of_step.finish(rows=1, sequence_length=1000).step_s == 1.0


def test_moments_of_a_queue_are_read_a_step_late():
    # As on a GPU: at the end of a step its moments have not passed yet.
    class Queue:
        is_late = True

        def __init__(self):
            self.moment = 0.0

        def now(self):
            self.moment += 1
            return self.moment

        def seconds(self, first, then):
            return then - first

    phases = Phases(Queue())
    phases.start()
    phases.mark("forward")
    phases.mark("backward")
    assert phases.shares() == {}
    phases.start()
    phases.mark("optimizer")
    assert phases.shares()["forward"] == phases.shares()["backward"] == 0.5


def test_peak_memory_is_in_bytes():
    assert peak_memory_bytes() > 10 * 2**20  # an interpreter with numpy is larger than 10 MiB
