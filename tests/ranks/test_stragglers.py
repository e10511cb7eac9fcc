"""Ranks compare their own times: the slow one is named though all steps take equally long."""

import logging
import time

from penstock.obs.meter import Rates
from penstock.testing.ranks import on_ranks
from penstock.train.monitors.step_monitors import Stragglers


def times_of(world):
    """Play four steps of 1 s; the others were blocked for what rank 1 took longer."""
    own = {0: 0.2, 1: 0.9, 2: 0.25}[world.ranks.rank]
    rates = Rates(step_s=1.0, tokens_per_s=1.0, mfu=0.0, hfu=0.0, shares={"communication": 1 - own})
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("penstock.train.monitors.step_monitors").addHandler(handler)
    stragglers = Stragglers(world, every=2, ratio=1.5)
    records = [record for step in range(1, 5) for record in stragglers.add(rates, step=step)]
    return records, said


def test_the_rank_the_others_wait_for_is_named():
    found = on_ranks(times_of, ranks=3)
    for records, _ in found:
        assert [record["step"] for record in records] == [2, 4]
        for record in records:
            assert (record["slowest_rank"], round(record["slowest_s"], 6)) == (1, 0.9)
            assert round(record["median_s"], 6) == 0.25
    assert found[0][1] == [
        "The others wait for rank 1: its own work took 0.900 s a step, the median 0.250 s (steps 1 to 2)",
        "The others wait for rank 1: its own work took 0.900 s a step, the median 0.250 s (steps 3 to 4)",
    ]
    assert found[1][1] == []


def compared_while_one_works_longer(world):
    """Time real collectives around real work."""
    stragglers = Stragglers(world, every=3, ratio=1.5)
    records = []
    for step in range(1, 4):
        start = time.perf_counter()
        time.sleep(0.2 if world.ranks.rank == 0 else 0.01)
        arrived = time.perf_counter()
        world.sum(1.0)
        whole = time.perf_counter() - start
        blocked = time.perf_counter() - arrived
        rates = Rates(
            step_s=whole, tokens_per_s=1.0, mfu=0.0, hfu=0.0, shares={"communication": blocked / whole}
        )
        records += stragglers.add(rates, step=step)
    return records


def test_time_blocked_on_others_is_not_a_ranks_own():
    (record,), *_ = on_ranks(compared_while_one_works_longer, ranks=3)
    assert record["slowest_rank"] == 0
    assert record["slowest_s"] > record["median_s"]
