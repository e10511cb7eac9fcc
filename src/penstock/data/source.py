"""One corpus of a mixture as an endless sequence of rows, read through a cache of packed pools."""

from threading import Lock

from penstock.core.errors import CorpusExhausted
from penstock.data.holdout import TokenSpace
from penstock.data.order import Geometry, Order, Places
from penstock.data.pool import PackedPool, pack_pool
from penstock.data.types import Int64


class Source:
    """Rows of one corpus by its own sample index.

    Args:
        max_epochs: samples beyond so many epochs are refused; None for no cap.
    """

    def __init__(
        self,
        name: str,
        space: TokenSpace,
        geometry: Geometry,
        *,
        seed: int,
        rule: str,
        max_epochs: int | None,
    ) -> None:
        self.name = name
        self.space = space
        self.order = Order(space.num_tokens, geometry, name=name, seed=seed)
        self.max_samples = None if max_epochs is None else max_epochs * self.order.samples_per_epoch
        self._rule = rule
        self._pools: dict[tuple[int, int], PackedPool] = {}
        self._lock = Lock()

    def identity(self) -> dict[str, int | str]:
        """Return what makes this source's rows what they are: sizes and the corpus's fingerprint."""
        return {
            "T": self.space.num_tokens,
            "B": self.order.geometry.block_tokens,
            "K": self.order.geometry.blocks_per_pool,
            "V": self.order.geometry.lanes,
            "fingerprint": self.space.corpus.fingerprint,
        }

    def locate(self, samples: Int64) -> Places:
        """Return the places of samples [n].

        Raises:
            CorpusExhausted: one of them lies beyond the cap on epochs.
        """
        if self.max_samples is not None and len(samples) and int(samples.max()) >= self.max_samples:
            epochs = self.max_samples // self.order.samples_per_epoch
            raise CorpusExhausted(
                f"Corpus {self.name!r} has given all {self.max_samples:,} sequences of its {epochs} epochs",
                fix="Train for fewer steps, raise its epochs, or give it a smaller weight.",
            )
        return self.order.locate(samples)

    def rows(self, epochs: Int64, pools: Int64, rows: Int64) -> list[Int64]:
        """Return the piece tables of rows [n]: n arrays of pieces as in PackedPool."""
        tables = []
        for epoch, pool, row in zip(epochs.tolist(), pools.tolist(), rows.tolist(), strict=True):
            packed = self._pools.get((epoch, pool)) or self._open(epoch, pool)
            tables.append(packed.pieces[packed.firsts[row] : packed.pasts[row]])
        return tables

    def _open(self, epoch: int, pool: int) -> PackedPool:
        """Pack a pool, once; as many are kept as there are lanes, the oldest goes first."""
        with self._lock:
            if (epoch, pool) not in self._pools:
                packed = pack_pool(self.space, self.order, epoch=epoch, pool=pool, rule=self._rule)
                while len(self._pools) > self.order.geometry.lanes:
                    self._pools.pop(next(iter(self._pools)))
                self._pools[epoch, pool] = packed
            return self._pools[epoch, pool]
