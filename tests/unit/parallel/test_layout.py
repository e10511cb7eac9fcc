"""Degrees and the arithmetic of ranks."""

import itertools

import pytest

from penstock.core.errors import ConfigError
from penstock.parallel.layout import AXES, ParallelConfig, RankLayout, layout_of, on_machines


def test_the_rest_goes_to_the_axis_that_asks_for_it():
    assert layout_of(ParallelConfig(), world_size=6) == RankLayout(shard=6)
    assert layout_of(ParallelConfig(tensor=2), world_size=6) == RankLayout(shard=3, tensor=2)
    assert layout_of(ParallelConfig(shard=2, replicate=-1), world_size=8) == RankLayout(shard=2, replicate=4)
    assert layout_of(ParallelConfig(shard=1, replicate=-1), world_size=8) == RankLayout(replicate=8)


@pytest.mark.parametrize(
    ("degrees", "world_size", "said"),
    [
        ({"tensor": 3}, 8, "3) do not divide 8 ranks. Start a multiple of 3 ranks"),
        ({"tensor": 4}, 2, "4) do not divide 2 ranks"),
        ({"shard": 2, "tensor": 2}, 8, "multiply to 4, and there are 8 ranks. Start 4 ranks"),
        ({"reshard_after_forward": 3}, 8, "does not divide the 8 ranks that share the parameters (got 3)"),
    ],
)
def test_degrees_that_do_not_fit_the_ranks_are_refused_with_what_would(degrees, world_size, said):
    with pytest.raises(ConfigError) as refused:
        layout_of(ParallelConfig(**degrees), world_size=world_size)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tensor": 0}, "parallel.tensor must be 1 or more (got 0)"),
        ({"tensor": -1}, "parallel.tensor must be 1 or more (got -1)"),
        ({"shard": 0}, "or -1 for all remaining ranks (got 0)"),
        ({"replicate": -1}, "parallel.shard and parallel.replicate are both -1"),
        ({"stages_per_rank": 2}, "parallel.stages_per_rank must be 1, or more with a pipeline (got 2)"),
        ({"reshard_after_forward": 1}, "a group of at least 2 ranks (got 1)"),
        ({"reshard_after_forward": 2, "tensor": 2}, "only where all ranks share the parameters"),
        ({"hierarchy": "hybrid", "replicate": 2}, "parallel.hierarchy 'hybrid' sets parallel.shard itself"),
        ({"hierarchy": "hpz", "reshard_after_forward": 4}, "sets parallel.reshard_after_forward itself"),
        (
            {"hierarchy": "hpz", "tensor": 2},
            "parallel.hierarchy 'hpz' supports sharding only (got 'tensor 2,",
        ),
    ],
)
def test_values_that_no_run_could_have_are_refused(values, said):
    with pytest.raises(ConfigError) as refused:
        ParallelConfig(**values)
    assert said in str(refused.value)


@pytest.mark.parametrize("degrees", [(1, 2, 3, 1, 2), (2, 1, 2, 2, 2), (1, 1, 1, 1, 1), (3, 2, 1, 1, 1)])
def test_every_rank_has_a_place_of_its_own_and_the_innermost_axis_moves_first(degrees):
    layout = RankLayout(**dict(zip(AXES, degrees, strict=True)))
    places = [tuple(layout.place(rank).values()) for rank in range(layout.world_size)]
    assert places == list(itertools.product(*map(range, degrees)))


def test_the_rows_are_dealt_over_replicas_and_shards_and_shared_by_the_rest():
    layout = RankLayout(pipeline=2, replicate=2, shard=2, context=2, tensor=2)
    assert layout.num_data == 4
    groups = {tuple(layout.sharing(rank)) for rank in range(layout.world_size)}
    assert sorted(itertools.chain(*groups)) == list(range(32)), "each rank in one group"
    assert {len(group) for group in groups} == {8}
    assert sum(layout.leads(rank) for rank in range(32)) == 4, "one rank speaks for each group"
    for group in groups:
        assert len({layout.data_rank(rank) for rank in group}) == 1


@pytest.mark.parametrize(
    ("values", "world_size", "found"),
    [
        ({"hierarchy": "hybrid"}, 16, "replicate 2 x shard 8"),
        ({"hierarchy": "hybrid"}, 8, "shard 8"),
        (
            {"hierarchy": "hybrid", "tensor": 2, "context": 2},
            16,
            "replicate 2 x shard 2 x context 2 x tensor 2",
        ),
        ({"hierarchy": "hybrid", "pipeline": 4}, 16, "pipeline 4 x shard 4"),
        ({"hierarchy": "hybrid", "pipeline": 2}, 32, "pipeline 2 x replicate 2 x shard 8"),
    ],
)
def test_copies_lie_on_machines_of_their_own(values, world_size, found):
    config = on_machines(ParallelConfig(**values), world_size=world_size, ranks_per_machine=8)
    assert str(layout_of(config, world_size=world_size)) == found


@pytest.mark.parametrize(("world_size", "size"), [(16, 8), (8, True), (4, True)])
def test_a_second_gather_stays_inside_a_machine_if_there_are_several(world_size, size):
    config = ParallelConfig(hierarchy="hpz")
    found = on_machines(config, world_size=world_size, ranks_per_machine=min(8, world_size))
    assert found.reshard_after_forward is size or found.reshard_after_forward == size
    assert found.hierarchy == "flat"


def test_a_machine_that_cannot_be_cut_is_refused():
    config = ParallelConfig(hierarchy="hybrid", tensor=3)
    with pytest.raises(
        ConfigError, match=r"tensor 3 x parallel\.context 1 do not divide the 8 ranks of a machine"
    ):
        on_machines(config, world_size=24, ranks_per_machine=8)
