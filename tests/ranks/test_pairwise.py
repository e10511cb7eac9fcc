"""Messages between all ranks of a group bring what the collectives bring, and say what is waited for."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from penstock.core import clock
from penstock.parallel.ethernet import async_collectives
from penstock.parallel.ethernet.all_to_all import MESSAGES, begin_messages, can_exchange, can_gather
from penstock.parallel.ethernet.async_collectives import begin_exchange, begin_gather, wait_for
from penstock.parallel.ethernet.codecs import Encoder
from penstock.parallel.mesh import World
from penstock.testing.ranks import on_ranks
from penstock.train.monitors.watchdog import Watchdog

SIZES = (1, 7, 1000, 3)
DEADLINE_S = 60.0


def test_several_under_way_never_mix_up() -> None:
    """Gathers and exchanges of several sizes, cut and whole, begun together and waited for from the last."""

    def moved(world: World) -> int:
        async_collectives.LEAST = 64
        group, ranks, here = dist.group.WORLD, world.ranks.world_size, world.ranks.rank
        assert group is not None
        assert can_exchange(group)
        before = MESSAGES.sent_bytes.copy()
        waits = []
        for place, size in enumerate(SIZES):
            mine = torch.full((size,), 10.0 * place + here)
            whole = torch.empty(ranks * size)
            gathering = begin_gather(whole, mine, group, operations=3)
            given = torch.stack([torch.full((size,), 100.0 * here + 10 * place + to) for to in range(ranks)])
            exchanged = begin_exchange(given, group, operations=2, encoder=Encoder("float32"))
            waits.append((place, size, whole, gathering, exchanged))
        for place, size, whole, gathering, exchanged in reversed(waits):
            wait_for(gathering)
            wait_for(part.work for part in exchanged)
            expected = [10.0 * place + other for other in range(ranks)]
            assert whole.view(ranks, size).tolist() == [[x] * size for x in expected]
            received = torch.cat([part.numbers("float32") for part in exchanged], dim=1)
            expected = [100.0 * other + 10 * place + here for other in range(ranks)]
            assert received.tolist() == [[x] * size for x in expected]
        return (MESSAGES.sent_bytes - before).total()

    # each rank sends its numbers to two others, once to be gathered and once exchanged
    assert on_ranks(moved, ranks=3) == [2 * 2 * 4 * sum(SIZES)] * 3


def test_a_ring_gathers_where_several_machines_have_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(world: World) -> list[bool]:
        del world
        found = []
        for machine in (1, 2, 4):
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(machine))
            assert dist.group.WORLD is not None
            found.append(can_gather(dist.group.WORLD))
        return found

    assert on_ranks(chosen, ranks=4) == [[True, False, True]] * 4


def test_last_words_name_the_messages_that_are_waited_for(tmp_path: Path) -> None:
    """Rank 1 comes only after the watchdog of rank 0 has spoken."""
    words = tmp_path / "hangs" / "rank-00000.json"

    def waited(world: World) -> None:
        group, rank = dist.group.WORLD, world.ranks.rank
        assert group is not None
        watchdog = Watchdog(tmp_path, rank=0, world_size=1, hang_s=0.1, end=lambda: None)
        if rank == 1:
            deadline = clock.monotonic() + DEADLINE_S
            while not words.exists() and clock.monotonic() < deadline:
                clock.sleep(0.02)
        else:
            watchdog.__enter__()
        rows = [torch.zeros(1), torch.zeros(1)]
        begin_messages(rows, [row.clone() for row in rows], group, name="gather", tag=0).wait()
        if rank == 0:
            watchdog.__exit__(None, None, None)
        assert MESSAGES.waited_for == ""

    on_ranks(waited, ranks=2)
    found = json.loads(words.read_text())
    assert found["last_collective"].startswith("gather of ")
    assert "messages 1" in found["last_collective"]
    assert found["num_collectives"] >= 1
