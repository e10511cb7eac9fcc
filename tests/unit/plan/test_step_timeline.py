"""The step's events against schedules that can be worked out on paper."""

from itertools import pairwise

import pytest

from penstock.plan.comm import Cost
from penstock.plan.timeline import NOTHING, BlockCost, Transfers, simulate


def network(seconds: float) -> Cost:
    return Cost(seconds, "network", 1000 * seconds, 0.0)


def unit(*, gather: float = 1.0, again: float = 1.0, reduce: float = 1.0, **own) -> BlockCost:
    transfers = Transfers(network(gather), network(again), network(reduce))
    return BlockCost(**{"name": "block", "forward": 2.0, "backward": 4.0, "transfers": transfers, **own})


def test_without_collectives_a_step_is_its_computing():
    line = simulate(
        [BlockCost(name="block", forward=1.0, backward=2.0, transfers=NOTHING)] * 4, num_micro_batches=3
    )
    assert line.seconds == line.compute_s == 36.0


def test_only_the_first_gather_and_the_last_reduction_show_when_the_network_is_faster():
    line = simulate([unit()] * 4, num_micro_batches=1)
    assert line.compute_s == 24.0
    assert line.seconds == 24.0 + 1.0 + 1.0
    assert line.exposed_s["network"] == 2.0


def test_a_window_of_one_gathers_and_computes_in_turn():
    assert simulate([unit(reduce=0.5)] * 4, num_micro_batches=1, window=1).seconds == 24.0 + 8 * 1.0 + 4 * 0.5


def test_what_does_not_overlap_adds_up():
    line = simulate([unit()] * 4, num_micro_batches=2, overlapped=False)
    assert line.seconds == 2 * (24.0 + 12.0)
    assert line.exposed_s["network"] == 24.0


def test_a_network_slower_than_computing_decides_the_step():
    line = simulate([unit(gather=10.0, again=10.0, reduce=10.0)] * 4, num_micro_batches=1)
    assert line.busy_s["network"] == 120.0
    assert 120.0 <= line.seconds <= 120.0 + 2 * 4.0


def test_kept_units_are_gathered_once_and_reduced_once_a_step():
    line = simulate([unit(kept=True)] * 4, num_micro_batches=5)
    assert line.node_bytes == 4 * (1000 + 1000)
    assert simulate([unit()] * 4, num_micro_batches=5).node_bytes == 5 * 4 * 3000


def test_many_micro_batches_are_like_one_more_of_the_middle():
    times = [simulate([unit(gather=3.0)] * 4, num_micro_batches=n) for n in (3, 4, 7, 30)]
    per = times[1].seconds - times[0].seconds
    assert times[2].seconds == pytest.approx(times[0].seconds + 4 * per)
    assert times[3].compute_s == pytest.approx(30 * 24.0)


def test_every_second_is_computing_or_waiting_for_something():
    for slow in (0.2, 2.0, 20.0):
        line = simulate(
            [unit(gather=slow, stall=0.5, inline=0.1, inline_link="node")] * 5, num_micro_batches=4
        )
        assert line.seconds == pytest.approx(line.compute_s + sum(line.exposed_s.values()) + line.stalled_s)


def test_recorded_events_of_a_stream_follow_one_another():
    events = simulate([unit()] * 3, num_micro_batches=2, record=True).events
    for stream in ("compute", "gather", "reduce"):
        mine = [event for event in events if event.stream == stream]
        assert mine
        assert all(a.start_s + a.seconds <= b.start_s + 1e-9 for a, b in pairwise(mine))


def test_blocks_at_a_turn_are_not_gathered_twice():
    """Of 4 blocks and the head, 2 stay for the backward, 2 and the head for the next forward."""
    whole = [unit(reduce=0.0)] * 5
    line = simulate(whole, num_micro_batches=3, turning=2, record=True)
    gathers = [event for event in line.events if event.stream == "gather"]
    assert len(gathers) == 5 + 3 + 2 * (2 + 3)
