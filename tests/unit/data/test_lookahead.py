"""When tokens are read next: the order backwards, held against the order forwards."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.corpus.open import open_corpus
from penstock.data.lookahead import Lookahead, next_use
from penstock.data.order.epochs import FullEpochs
from penstock.data.order.holdout import TokenSpace
from penstock.data.order.permutation import Geometry
from penstock.data.order.row_order import Order
from penstock.testing.corpora import numbered_corpus
from tests.examples import examples

GEOMETRIES = st.builds(
    Geometry,
    sequence_length=st.just(4),
    block_tokens=st.sampled_from([4, 12, 64]),
    blocks_per_pool=st.sampled_from([1, 3, 16]),
    lanes=st.sampled_from([1, 2, 5]),
)


class Anywhere(TokenSpace):
    """Intervals of a corpus that is never opened."""

    def __init__(self, intervals: list[tuple[int, int]]) -> None:
        super().__init__(None, np.array(intervals))  # type: ignore[arg-type]


@given(num_tokens=st.integers(1, 3_000), geometry=GEOMETRIES, epoch=st.integers(0, 3))
def test_every_token_is_found_in_the_pool_that_reads_it(
    num_tokens: int, geometry: Geometry, epoch: int
) -> None:
    order = Order(num_tokens, geometry, name="web", seed=1)
    expected = np.full(num_tokens, -1)
    for pool in range(order.num_pools):
        for start, stop in order.blocks.of_pool(epoch, pool):
            expected[start:stop] = pool
    assert (order.blocks.pools_at(epoch, np.arange(num_tokens)) == expected).all()


@examples(40)
@given(geometry=GEOMETRIES, data=st.data())
def test_the_next_use_of_a_range_is_that_of_its_first_token_to_come(
    geometry: Geometry, data: st.DataObject
) -> None:
    space = Anywhere([(10, 400), (450, 1_000)])
    order = Order(space.num_tokens, geometry, name="web", seed=1)
    entry = FullEpochs(space, order)
    groups = -(-order.num_pools // geometry.lanes)
    epoch, group = data.draw(st.integers(0, 2)), data.draw(st.integers(0, groups - 1))
    when = np.full(1_100, np.inf)  # groups until each corpus position is read
    for later in (1, 0):
        for pool in range(order.num_pools):
            away = later * groups + pool // geometry.lanes - group
            for start, stop in space.in_corpus(order.blocks.of_pool(epoch + later, pool)):
                if away >= 0:
                    when[start:stop] = away
    edges = sorted(data.draw(st.lists(st.integers(0, 1_100), min_size=2, max_size=12, unique=True)))
    starts, stops = np.array(edges[:-1]), np.array(edges[1:])
    found = next_use(entry, starts, stops, epoch=epoch, group=group)
    samples = geometry.lanes * geometry.rows_per_pool
    # It is looked at once a block: a range that leaves and enters the space may be reported late, not early.
    exact = np.array([when[a:b].min() for a, b in zip(starts, stops, strict=True)]) * samples
    inside = np.array([np.isfinite(when[a:b]).all() for a, b in zip(starts, stops, strict=True)])
    assert (found >= exact).all()
    far = (stops - starts) > 0
    if epoch == 0 and inside.any():  # without rotation the blocks of the space lie as they are looked at
        assert np.isfinite(found[inside & far]).all()


def test_a_local_corpus_costs_nothing(tmp_path: Path) -> None:
    corpus = open_corpus(numbered_corpus(tmp_path, [5, 5]))
    Lookahead(corpus, max_epochs=None).read([], [[0, 0, 0, 0]] * 3)
