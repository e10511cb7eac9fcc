"""Sizes of the shuffle by the size of the corpus."""

from itertools import pairwise

import numpy as np
import pytest

from penstock.data.order.permutation import Geometry, choose_geometry


def pools_of(num_tokens: int, geometry: Geometry) -> int:
    return -(-num_tokens // geometry.pool_tokens)


@pytest.mark.parametrize(
    ("num_tokens", "length", "block_rows", "lanes", "rows_per_pool"),
    [
        (10**3, 16, 16, 1, 256),
        (10**6, 16, 16, 49, 256),
        (10**6, 4096, 16, 1, 256),
        (10**9, 4096, 32, 53, 512),
        (10**12, 4096, 256, 64, 4096),
        (10**14, 4096, 256, 64, 4096),
        (10**14, 2**20, 256, 64, 4096),
    ],
)
def test_a_smaller_corpus_gets_smaller_blocks_then_fewer_lanes(
    num_tokens: int, length: int, block_rows: int, lanes: int, rows_per_pool: int
) -> None:
    geometry = choose_geometry(num_tokens, sequence_length=length)
    assert geometry.block_tokens == block_rows * length
    assert geometry.lanes == lanes
    assert geometry.rows_per_pool == rows_per_pool


@pytest.mark.parametrize("length", [2, 16, 4096, 131_072])
@pytest.mark.parametrize("num_tokens", [10**power for power in range(3, 15)])
def test_every_lane_owns_several_pools_or_there_is_one_lane(num_tokens: int, length: int) -> None:
    geometry = choose_geometry(num_tokens, sequence_length=length)
    assert geometry.lanes == 1 or pools_of(num_tokens, geometry) >= 4 * geometry.lanes
    assert geometry.lanes <= 64
    assert geometry.block_tokens // length in (16, 32, 64, 128, 256)


@pytest.mark.parametrize("length", [16, 4096])
def test_blocks_do_not_shrink_as_a_corpus_grows_and_lanes_by_a_quarter_at_most(length: int) -> None:
    sizes = np.unique(np.geomspace(1, 10**14, 400).astype(np.int64)).tolist()
    geometries = [choose_geometry(n, sequence_length=length) for n in sizes]
    for smaller, larger in pairwise(geometries):
        assert smaller.block_tokens <= larger.block_tokens
        if smaller.block_tokens == larger.block_tokens:
            assert 3 * smaller.lanes <= 4 * larger.lanes


@pytest.mark.parametrize("num_tokens", np.unique(np.geomspace(10**6, 10**12, 50).astype(np.int64)).tolist())
def test_the_last_group_of_lanes_is_nearly_full_unless_it_is_a_small_part_of_the_epoch(
    num_tokens: int,
) -> None:
    geometry = choose_geometry(num_tokens, sequence_length=4096)
    pools = pools_of(num_tokens, geometry)
    empty = -pools % geometry.lanes
    assert empty <= max(2, geometry.lanes / 3) or geometry.lanes < pools / 60


def test_a_corpus_of_sixteen_of_the_smallest_blocks_is_one_pool() -> None:
    for num_tokens, pools in ((16 * 16 * 16, 1), (16 * 16 * 16 + 1, 2)):
        assert pools_of(num_tokens, choose_geometry(num_tokens, sequence_length=16)) == pools
