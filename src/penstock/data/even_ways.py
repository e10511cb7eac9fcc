"""The places of samples of many corpora in one go, where arithmetic alone says them.

Nearly every corpus of a large mixture is read in the same way: one endless leg of full rows. Then the places
of samples of a thousand corpora are a few operations on arrays, with a corpus's numbers looked up for each
sample; corpus by corpus they would be some twenty microseconds each. A way of another kind (it grew, it
changed its length, its rows were counted) is left to whoever asks.
"""

import numpy as np

from penstock.data.legs import Passes
from penstock.data.order import Places
from penstock.data.types import Bool, Int64
from penstock.data.way import Way

_FIRST, _EPOCH, _LANES, _ROWS, _LAST_GROUP, _LAST_LANES, _LAST_ROWS, _SUPPLY = range(8)
_NO_END = 2**63 - 1


class EvenWays:
    """What is known of the ways of numbered corpora at one sequence length."""

    def __init__(self, num_corpora: int) -> None:
        self._known = np.zeros(num_corpora, dtype=np.bool_)
        self._numbers = np.ones((8, num_corpora), dtype=np.int64)
        self._numbers[_SUPPLY] = 0  # of a corpus that is not covered

    def unknown(self, corpora: Int64) -> list[int]:
        """Return those of some corpora that nothing was learnt of yet."""
        found: list[int] = corpora[~self._known[corpora]].tolist()
        return found

    def learn(self, corpus: int, way: Way, *, supply: int | None) -> None:
        """Note the way of a corpus.

        Args:
            supply: samples that its cap on epochs allows; None: no cap.
        """
        self._known[corpus] = True
        leg = way.legs[0] if len(way.legs) == 1 else None
        if not isinstance(leg, Passes) or leg.epochs is not None or leg.order.counter is not None:
            return
        order, geometry, last = leg.order, leg.order.geometry, leg.order.num_pools - 1
        self._numbers[:, corpus] = (
            leg.first * order.samples_per_epoch,
            order.samples_per_epoch,
            geometry.lanes,
            geometry.rows_per_pool,
            last // geometry.lanes,
            last % geometry.lanes + 1,
            order.rows_in_pool(last),
            _NO_END if supply is None else supply,
        )

    def covers(self, corpora: Int64, turns: Int64) -> Bool:
        """Return whether corpora's own samples [n] are on even ways, and within their caps."""
        covered: Bool = turns < self._numbers[_SUPPLY, corpora]
        return covered

    def places(self, corpora: Int64, turns: Int64) -> Places:
        """Return the places of corpora's own samples [n], all of which are covered."""
        first, epoch_rows, lanes, rows, last_group, last_lanes, last_rows, _ = self._numbers[:, corpora]
        epoch, k = np.divmod(turns + first, epoch_rows)
        group, inside = np.divmod(k, lanes * rows)
        is_last = group == last_group
        row, lane = np.divmod(inside, np.where(is_last, last_lanes, lanes))
        # The last pool of all may be short. When it is used up, the other lanes of its group go on.
        alone = np.flatnonzero(is_last & (row >= last_rows))
        rest, others = inside[alone] - (last_rows * last_lanes)[alone], last_lanes[alone] - 1
        row[alone], lane[alone] = last_rows[alone] + rest // others, rest % others
        return Places(epoch=epoch, pool=group * lanes + lane, lane=lane, row=row)
