"""Ranks of one machine exchange numbers through memory: sums in one order, and no wait for who is gone."""

import mmap
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist

from penstock.engine.model_runner import collectives as board_module
from penstock.engine.model_runner.collectives import RankGroup, SharedBoard
from penstock.models.decoder.tensor_slices import TensorParallelRank
from penstock.nn import native
from penstock.testing.ranks import on_ranks

needs_operators = pytest.mark.skipif(not native.is_available(), reason="no C++ compiler here")

SIZES = [1, 17, 768, 300_000, 5, 1_100_000]
"""Of sums one after the other; the large ones are several pieces of a board of 1 MiB slots."""


def numbers(rank, size, dtype):
    return torch.randn(size, generator=torch.Generator().manual_seed(31 * size + rank)).to(dtype)


def in_order(ranks, size, dtype):
    """The sum from the first rank to the last in float32, rounded once."""
    total = numbers(0, size, torch.float32).to(dtype).float()
    for rank in range(1, ranks):
        total += numbers(rank, size, dtype).float()
    return total.to(dtype)


def group_of(world, meeting):
    place = TensorParallelRank(world.ranks.rank, world.ranks.world_size)
    group = RankGroup(place, world.device)
    group.join(meeting)
    return group, place


def exchange(world, *, meeting, without=None):
    if world.ranks.rank == without:
        native.is_available = lambda: False
    board_module.SLOT_BYTES = 2**20
    group, place = group_of(world, meeting)
    sums, gathered = [], []
    for dtype in (torch.float32, torch.bfloat16):
        for size in SIZES:
            sums.append(group.sum(numbers(place.rank, size, dtype)))
            gathered.append(group.gather(numbers(place.rank, size, dtype).view(1, -1)))
    doubles = group.sum(torch.full((3,), 0.5, dtype=torch.float64))
    shares = group.board is not None
    group.close()
    group.close()
    return sums, gathered, doubles, shares


@needs_operators
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_get_the_sum_in_the_order_of_ranks(ranks, tmp_path):
    found = on_ranks(partial(exchange, meeting=tmp_path / "meeting"), ranks=ranks)
    expected = [in_order(ranks, size, dtype) for dtype in (torch.float32, torch.bfloat16) for size in SIZES]
    for sums, _, doubles, shares in found:
        assert shares
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(sums, expected, strict=True))
        assert doubles.tolist() == [0.5 * ranks] * 3
    for gathered, (dtype, size) in zip(
        found[0][1], [(d, s) for d in (torch.float32, torch.bfloat16) for s in SIZES], strict=True
    ):
        assert [part.shape for part in gathered] == [(1, size)] * ranks
        assert all(torch.equal(part[0], numbers(rank, size, dtype)) for rank, part in enumerate(gathered))
    assert all(gathered == [] for _, all_gathered, *_ in found[1:] for gathered in all_gathered)


def test_ranks_of_which_one_has_no_operators_exchange_over_loopback(tmp_path):
    found = on_ranks(partial(exchange, meeting=tmp_path / "meeting", without=1), ranks=2)
    for sums, _, _, shares in found:
        assert not shares
        for total, size in zip(sums, SIZES, strict=False):
            torch.testing.assert_close(total, in_order(2, size, torch.float32))


def meet_and_leave(world, *, meeting, how):
    """The second rank never comes to the sum; return what the first is told, in this sum and in the next."""
    place = TensorParallelRank(world.ranks.rank, world.ranks.world_size)
    store = dist.FileStore(str(meeting), place.ranks)
    board = SharedBoard.meet(store, place, timeout_s=0.3 if how == "late" else 100.0)
    said = []
    if place.rank == 1 and how == "gone":
        os.close(board._file)  # as the kernel does when a process ends
    if place.rank == 1 and how == "closed":
        board.close()
    for _ in range(2 if place.rank == 0 else 0):
        with pytest.raises(RuntimeError) as told:
            board.sum(torch.ones(4))
        said.append(str(told.value))
    dist.barrier()
    if how != "gone":
        board.close()
    return said


@needs_operators
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("gone", "Rank 1 is gone: Connection closed by peer"),
        ("closed", "The ranks' board was closed: Connection closed by peer"),
        ("late", "Timed out after 0.3 s of waiting for another rank"),
    ],
)
def test_a_rank_that_waits_in_vain_is_told_why(how, said, tmp_path):
    found = on_ranks(partial(meet_and_leave, meeting=tmp_path / "meeting", how=how), ranks=2)
    assert found[0] == [said, said]


def meet_and_close(world, *, memory, boards):
    """Sum once on each of many boards, and close it at once; return how many sums were right."""
    rank, right = world.ranks.rank, 0
    for board in range(boards):
        lines = torch.frombuffer(memory, dtype=torch.int32, offset=320 * board, count=48)
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=320 * board + 192, count=128)
        own = torch.classes.penstock.Board(lines.view(3, 16), slots.view(2, 2, 32), rank, -1, 100.0)
        total = torch.full((4,), float(board + rank))
        own.sum(total)
        own.end()
        right += total.tolist() == [2.0 * board + 1] * 4
    return right


@needs_operators
def test_a_rank_that_closes_the_board_after_its_part_takes_it_from_nobody():
    boards = 20_000  # a rank must be overtaken between two lines of its wait: once in some thousands
    with mmap.mmap(-1, 320 * boards) as memory:
        found = on_ranks(partial(meet_and_close, memory=memory, boards=boards), ranks=2)
    assert found == [boards, boards]


@needs_operators
def test_what_is_no_board_or_no_part_of_one_is_refused():
    make = torch.classes.penstock.Board
    lines, slots = torch.zeros(3, 16, dtype=torch.int32), torch.zeros(2, 2, 64, dtype=torch.uint8)
    for wrong in ((lines[:2], slots, 0), (lines, slots, 2), (lines, slots.view(2, -1), 0), (slots, lines, 0)):
        with pytest.raises(RuntimeError, match="Board: lines"):
            make(*wrong, 0, 1.0)
    board = make(lines, slots, 0, -1, 0.0)
    with pytest.raises(RuntimeError, match="68 bytes for slots of 64"):
        board.sum(torch.zeros(17))
    with pytest.raises(RuntimeError, match="must be contiguous"):
        board.sum(torch.zeros(4, 4).t())
    with pytest.raises(RuntimeError, match="no room for all ranks"):
        board.gather(torch.zeros(4), torch.zeros(1, 4))
    with pytest.raises(RuntimeError, match="Timed out after 0 s"):
        board.sum(torch.zeros(4))
