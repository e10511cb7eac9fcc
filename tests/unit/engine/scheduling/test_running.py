"""Blocks of running sequences: who may enter, and what one that grows or leaves takes and gives back."""

import pytest
from tests.hashing_model import sequences_of

from penstock.engine.request import Request
from penstock.engine.scheduling.blocks import BlockPool
from penstock.engine.scheduling.scheduler import Running


class Table:
    """Blocks of four positions, and sequences in the order of their arrival."""

    def __init__(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.running = Running(self.pool, block_size=4, most=8)
        self.count = 0

    def sequence(self, length, *, priority=0):
        self.count += 1
        request = Request(prompt=(self.count,) * length, max_tokens=9, priority=priority)
        return sequences_of(request, first_id=self.count)[0]

    def enter(self, length, **request):
        sequence = self.sequence(length, **request)
        self.running.enter(sequence, [])
        return sequence


@pytest.mark.parametrize(("num_free", "fits"), [(4, False), (5, True)])
def test_who_enters_leaves_each_running_sequence_its_next_block(num_free, fits):
    table = Table(2 + num_free)
    for _ in range(2):
        table.enter(4)
    assert table.running.fits(table.sequence(12), []) is fits


def test_a_block_in_use_costs_who_shares_it_nothing_and_an_idle_one_does():
    table = Table(4)
    holder = table.enter(8)
    twin = table.sequence(8)
    shared = holder.blocks[:1]
    assert not table.running.fits(twin, [])
    assert table.running.fits(twin, list(shared))
    table.pool.name(shared[0], b"what both begin with")
    table.running.leave(holder)
    assert not table.running.fits(table.sequence(20), list(shared))
    table.running.enter(twin, list(shared))
    assert (twin.num_computed, table.pool.num_free) == (4, 2)


def test_the_last_is_who_came_last_of_the_worst_priority():
    table = Table(8)
    worse = [table.enter(4, priority=1) for _ in range(2)]
    better = table.enter(4)
    assert table.running.sequences == [better, *worse]


def test_drafts_get_the_blocks_that_are_free_and_no_more():
    table = Table(3)
    sequence = table.enter(6)
    assert table.running.extend(sequence, 2) == 2
    assert table.pool.num_free == 1
    assert table.running.extend(sequence, 9) == 6
    assert table.pool.num_free == 0
    assert table.running.extend(sequence, -1) == 0


def test_who_leaves_gives_back_what_it_has_not_left_behind():
    table = Table(4)
    sequence = table.enter(14)
    table.running.release_before(sequence, 9)
    assert table.pool.num_used == 2
    table.running.release_before(sequence, 9)
    table.running.leave(sequence)
    assert (table.pool.num_used, len(sequence.blocks), sequence.num_released) == (0, 0, 0)
