"""Blocks of running sequences: who may enter, and what one that grows or leaves takes and gives back."""

import pytest
from tests.hashing_model import sequences_of

from penstock.engine.request import Request
from penstock.engine.scheduling.blocks import BlockPool, Prefix
from penstock.engine.scheduling.scheduler import Running

NOTHING = Prefix(0, ([],))


class Table:
    """Blocks of four positions, and sequences in the order of their arrival."""

    def __init__(self, num_blocks, **windows):
        self.pool = BlockPool(num_blocks)
        self.running = Running(self.pool, block_size=4, most=8, **windows)
        self.count = 0

    def sequence(self, length, *, priority=0):
        self.count += 1
        request = Request(prompt=(self.count,) * length, max_tokens=9, priority=priority)
        return sequences_of(request, first_id=self.count)[0]

    def enter(self, length, **request):
        sequence = self.sequence(length, **request)
        self.running.enter(sequence, Prefix(0, tuple([] for _ in self.running._max_blocks)))
        return sequence


@pytest.mark.parametrize(("num_free", "fits"), [(4, False), (5, True)])
def test_who_enters_leaves_each_running_sequence_its_next_block(num_free, fits):
    table = Table(2 + num_free)
    for _ in range(2):
        table.enter(4)
    assert table.running.fits(table.sequence(12), NOTHING) is fits


def test_a_block_in_use_costs_who_shares_it_nothing_and_an_idle_one_does():
    table = Table(4)
    holder = table.enter(8)
    twin = table.sequence(8)
    block = holder.tables[0].blocks[0]
    shared = Prefix(1, ([block],))
    assert not table.running.fits(twin, NOTHING)
    assert table.running.fits(twin, shared)
    table.pool.name(block, b"what both begin with")
    table.running.leave(holder)
    assert not table.running.fits(table.sequence(20), shared)
    table.running.enter(twin, shared)
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
    table = Table(8, windows=(None, 4), share_tokens=12)
    sequence = table.enter(14)
    table.running.grow(sequence, 12)
    assert table.pool.num_used == 4 + 3
    sequence.num_computed = 12
    table.running.release_unseen(sequence)
    assert table.pool.num_used == 4 + 1
    table.running.release_unseen(sequence)
    table.running.leave(sequence)
    assert (table.pool.num_used, sequence.tables) == (0, ())


@pytest.mark.parametrize(("num_free", "fits"), [(10, False), (11, True)])
def test_who_enters_leaves_prompts_in_progress_what_they_will_hold(num_free, fits):
    table = Table(10 + 1 + num_free, windows=(None, 8), share_tokens=4)
    table.running.grow(table.enter(40), 4)  # of its window it has one block, and will have four: 11 positions
    # three for the first, one more each for both groups, and for the new one two and two
    assert table.running.fits(table.sequence(8), Prefix(0, ([], []))) is (num_free >= 3 + 2 + 4)
    assert table.running.fits(table.sequence(12), Prefix(0, ([], []))) is fits


def test_drafts_leave_prompts_in_progress_what_they_will_hold():
    table = Table(4 + 1 + 2 + 4, windows=(None, 8), share_tokens=4)
    table.running.grow(table.enter(16), 4)
    sequence = table.enter(4)
    table.running.grow(sequence, 4)
    assert (table.pool.num_free, table.running.extend(sequence, 3)) == (4, 0)
