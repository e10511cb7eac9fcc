"""Collectives against what one process computes, forward and backward."""

import pickle
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from penstock.parallel.collectives import (
    CollectiveGroup,
    all_reduce,
    exchange,
    gather,
    scatter_sum,
    sum_gradient,
)
from penstock.parallel.exposed_comm import BLOCKED
from penstock.parallel.mesh import World, gather_values
from penstock.testing.ranks import on_ranks

RANKS = 3


def of_rank(rank: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def forward_and_backward(work, x: torch.Tensor, weigh: torch.Tensor):
    x = x.clone().requires_grad_()
    out = work(x)
    (out * weigh).sum().backward()
    return out.detach(), x.grad


def test_no_rank_begins_before_all_are_connected(tmp_path, monkeypatch):
    connect = dist.init_process_group

    def connect_late(*args, rank, **settings):
        connect(*args, rank=rank, **settings)
        if rank == 2:
            time.sleep(0.2)
            (tmp_path / "connected").touch()

    monkeypatch.setattr(dist, "init_process_group", connect_late)
    assert on_ranks(lambda _: (tmp_path / "connected").exists(), ranks=RANKS) == [True] * RANKS


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gather_joins_in_order_and_its_gradient_is_summed_over_who_used_it(dim):
    xs = [of_rank(rank, 2, 3, 4) for rank in range(RANKS)]
    whole = torch.cat(xs, dim)
    weighs = [of_rank(10 + rank, *whole.shape) for rank in range(RANKS)]

    def work(world):
        rank, group = world.ranks.rank, CollectiveGroup(dist.group.WORLD.group_name, RANKS)
        return forward_and_backward(lambda x: gather(x, dim=dim, group=group), xs[rank], weighs[rank])

    gradients = torch.stack(weighs).sum(0).chunk(RANKS, dim)
    for (out, gradient), expected in zip(on_ranks(work, ranks=RANKS), gradients, strict=True):
        assert out.equal(whole)
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("dim", [0, 1])
def test_scatter_sum_is_its_mirror(dim):
    xs = [of_rank(rank, 6, 9, 2) for rank in range(RANKS)]
    sums = torch.stack(xs).sum(0).chunk(RANKS, dim)
    weighs = [of_rank(10 + rank, *sums[0].shape) for rank in range(RANKS)]

    def work(world):
        rank, group = world.ranks.rank, CollectiveGroup(dist.group.WORLD.group_name, RANKS)
        return forward_and_backward(lambda x: scatter_sum(x, dim=dim, group=group), xs[rank], weighs[rank])

    for (out, gradient), expected in zip(on_ranks(work, ranks=RANKS), sums, strict=True):
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(gradient, torch.cat(weighs, dim))


def test_exchange_gives_each_rank_its_part_and_back_again():
    xs = [of_rank(rank, 2, 3, 6) for rank in range(RANKS)]
    parts = [torch.cat([x.chunk(RANKS, 2)[rank] for x in xs], dim=1) for rank in range(RANKS)]
    weighs = [of_rank(10 + rank, *parts[0].shape) for rank in range(RANKS)]

    def work(world):
        rank, group = world.ranks.rank, CollectiveGroup(dist.group.WORLD.group_name, RANKS)
        there = forward_and_backward(
            lambda x: exchange(x, split=2, join=1, group=group), xs[rank], weighs[rank]
        )
        return *there, exchange(there[0], split=1, join=2, group=group)

    for rank, (out, gradient, back) in enumerate(on_ranks(work, ranks=RANKS)):
        assert out.equal(parts[rank])
        assert back.equal(xs[rank])
        assert gradient.equal(torch.cat([w.chunk(RANKS, 1)[rank] for w in weighs], dim=2))


def test_sum_gradient_changes_nothing_but_the_gradient():
    x, weighs = of_rank(0, 5), [of_rank(10 + rank, 5) for rank in range(RANKS)]

    def work(world):
        group = CollectiveGroup(dist.group.WORLD.group_name, RANKS)
        largest = all_reduce(weighs[world.ranks.rank], "max", group)
        return *forward_and_backward(
            lambda x: sum_gradient(x, group=group), x, weighs[world.ranks.rank]
        ), largest

    for out, gradient, largest in on_ranks(work, ranks=RANKS):
        assert out.equal(x)
        torch.testing.assert_close(gradient, torch.stack(weighs).sum(0))
        assert largest.equal(torch.stack(weighs).amax(0))


WAITING = {
    "gather": lambda x, group: gather(x, dim=0, group=group),
    "scatter_sum": lambda x, group: scatter_sum(x, dim=0, group=group),
    "exchange": lambda x, group: exchange(x, split=0, join=1, group=group),
    "sum_gradient": lambda x, group: sum_gradient(x, group=group),
    "all_reduce": lambda x, group: x * all_reduce(x.detach(), "sum", group),
}


@pytest.mark.filterwarnings("ignore")  # the compiler warns of what it does itself
@pytest.mark.parametrize("compiled", [False, True])
def test_time_spent_in_them_is_counted_compiled_or_not(compiled):
    def work(_):
        group, counts = CollectiveGroup(dist.group.WORLD.group_name, RANKS), {}
        for name, collective in WAITING.items():
            call = torch.compile(collective, backend="aot_eager", fullgraph=True) if compiled else collective
            before = BLOCKED()
            out = call(torch.ones(3, 3, requires_grad=True), group)
            between = BLOCKED()
            out.sum().backward()
            counts[name] = between > before, BLOCKED() > between
        return counts

    for counts in on_ranks(work, ranks=RANKS):
        assert counts == dict.fromkeys(WAITING, (True, True)) | {
            "sum_gradient": (False, True),
            "all_reduce": (True, False),
        }


class Runs:
    """What a pickle does that runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


def test_values_of_ranks_are_gathered_and_a_pickle_of_a_peer_runs_nothing(tmp_path: Path) -> None:
    def work(world: World) -> object:
        rank = world.ranks.rank
        found = gather_values({"rank": rank, "text": "\u2028" * rank, "large": [2**63 - 1] * rank})
        if rank == 0:
            with pytest.raises(UnicodeDecodeError):
                gather_values("of rank 0")
            return found
        pickled = torch.frombuffer(bytearray(pickle.dumps(Runs(tmp_path / "ran"))), dtype=torch.uint8)
        own = torch.tensor([len(pickled)])
        dist.all_gather([torch.empty_like(own) for _ in range(2)], own)
        dist.all_gather([torch.empty_like(pickled) for _ in range(2)], pickled)
        return found

    wanted = [
        {"rank": 0, "text": "", "large": []},
        {"rank": 1, "text": "\u2028", "large": [2**63 - 1]},
    ]
    assert on_ranks(work, ranks=2) == [wanted, wanted]
    assert not (tmp_path / "ran").exists()
