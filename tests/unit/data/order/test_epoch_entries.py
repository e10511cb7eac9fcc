"""Legs: epochs, and what is left of one after changes of length, place by place and token by token."""

import numpy as np
import pytest

from penstock.data.corpus.open import open_corpus
from penstock.data.order.epochs import EpochEntry, FullEpochs
from penstock.data.order.holdout import TokenSpace, part_of
from penstock.data.order.permutation import choose_geometry
from penstock.data.order.pool import pack_pool
from penstock.data.order.row_order import Order
from penstock.data.types import PADDING
from penstock.testing.corpora import numbered_corpus

TOKENS, LENGTH = 6000, 2  # 12 pools on 2 lanes


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> TokenSpace:
    corpus = open_corpus(numbered_corpus(tmp_path_factory.mktemp("c"), [10] * (TOKENS // 10)))
    return part_of(corpus, name="c", split="train", holdout=0.0)


@pytest.fixture
def passes(space: TokenSpace) -> FullEpochs:
    order = Order(TOKENS, choose_geometry(TOKENS, sequence_length=LENGTH), name="c", seed=0)
    return FullEpochs(space, order, 0, None)


def positions(entry: EpochEntry, samples: range) -> list[int]:
    """Return the tokens that samples of an entry hold."""
    addresses, found, packed = entry.locate(np.array(samples)), [], {}
    for epoch, pool, row in zip(
        addresses.epoch.tolist(), addresses.pool.tolist(), addresses.row.tolist(), strict=True
    ):
        if pool not in packed:
            packed[pool] = pack_pool(
                entry.space,
                entry.order,
                epoch=epoch,
                pool=pool,
                rule="best_fit",
                repacks=entry.repacks(pool),
            )
        rows = packed[pool]
        for shard, start, stop, _ in rows.pieces[rows.firsts[row] : rows.pasts[row]].tolist():
            if shard != PADDING:
                found += range(
                    int(entry.space.corpus.starts[shard]) + start,
                    int(entry.space.corpus.starts[shard]) + stop,
                )
    return found


@pytest.mark.parametrize("taken", [1, 2, 100, 511, 512, 513, 1700, 2999])
@pytest.mark.parametrize("length", [3, 7, 512, 700])
def test_what_is_left_of_an_epoch_is_what_was_not_taken(passes: FullEpochs, taken: int, length: int) -> None:
    remainder = passes.remainder(taken, sequence_length=length)
    assert remainder is not None
    served = positions(passes, range(taken)) + positions(remainder, range(remainder.num_samples))
    assert sorted(served) == list(range(TOKENS))


@pytest.mark.parametrize("inside", [0, 1, 5, 60])
def test_a_rest_may_be_cut_again_and_again(passes: FullEpochs, inside: int) -> None:
    remainder = passes.remainder(101, sequence_length=7)
    assert remainder is not None
    served = positions(passes, range(101)) + positions(remainder, range(inside))
    later = remainder.remainder(inside, sequence_length=5)
    assert later is not None
    once_more = later.remainder(9, sequence_length=11)
    assert once_more is not None
    served += positions(later, range(9)) + positions(once_more, range(once_more.num_samples))
    assert sorted(served) == list(range(TOKENS))


def test_between_two_epochs_nothing_is_left(passes: FullEpochs) -> None:
    assert passes.remainder(0, sequence_length=3) is None
    assert passes.remainder(6000, sequence_length=3) is None


def test_addresses_in_a_remainder_lead_back_to_their_samples(passes: FullEpochs) -> None:
    remainder = passes.remainder(1700, sequence_length=7)
    assert remainder is not None
    addresses = remainder.locate(np.arange(remainder.num_samples))
    back = [
        remainder.sample_of(0, *at)
        for at in zip(addresses.pool.tolist(), addresses.row.tolist(), strict=True)
    ]
    assert back == list(range(remainder.num_samples))
    held = [pool for pool in range(12) if remainder.holds(pool)]
    assert held == sorted(set(addresses.pool.tolist()))


def test_entries_with_other_rows_have_other_identities(passes: FullEpochs) -> None:
    entries = [passes, *(passes.remainder(taken, sequence_length=n) for taken in (1, 2, 513) for n in (3, 4))]
    assert len({entry.identity for entry in entries if entry is not None}) == len(entries)
