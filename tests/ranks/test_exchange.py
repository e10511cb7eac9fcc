"""A mean over ranks in float32 and in few bits: near enough, the same bits everywhere, any size."""

import pytest
import torch
import torch.distributed as dist

from penstock.parallel.ethernet.compressed_all_reduce import MeanExchange
from penstock.testing.ranks import on_ranks


@pytest.mark.parametrize(("codec", "worst"), [("float32", 1e-7), ("int8", 0.01), ("int4", 0.17)])
def test_the_mean_is_the_same_on_all_ranks_and_near_the_true_one(codec, worst):
    """Rounded twice: by half of 1/127 or 1/7 of a block's largest number, here below 1."""

    def work(world):
        found = []
        for size in (1, 2, 700, 3000):
            numbers = torch.rand(world.ranks.world_size, size, generator=torch.Generator().manual_seed(size))
            exchange = MeanExchange(numbers[world.ranks.rank], dist.group.WORLD, codec)
            if size > 2:  # else result() does it
                exchange.turn()
                exchange.turn()
            found.append((exchange.result(), numbers.mean(0)))
        return found

    first, *others = on_ranks(work, ranks=3)
    for index, (mean, true) in enumerate(first):
        assert mean.shape == true.shape
        assert (mean - true).abs().max() <= worst
        assert all(torch.equal(mean, other[index][0]) for other in others)


def test_a_number_that_is_not_finite_is_not_rounded_away():
    def work(world):
        numbers = torch.ones(300)
        numbers[7] = torch.inf if world.ranks.rank else 1.0
        return MeanExchange(numbers, dist.group.WORLD, "int8").result()

    for mean in on_ranks(work, ranks=2):
        assert not mean[7].isfinite()
        assert mean[299] == 1
