"""Legs: epochs, and what is left of one after changes of length, place by place and token by token."""

import numpy as np
import pytest

from penstock.data.geometry import choose_geometry
from penstock.data.holdout import TokenSpace, part_of
from penstock.data.legs import Leg, Passes
from penstock.data.opening import open_corpus
from penstock.data.order import Order
from penstock.data.pool import PADDING, pack_pool
from penstock.testing.corpora import numbered_corpus

TOKENS, LENGTH = 6000, 2  # 12 pools on 2 lanes


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> TokenSpace:
    corpus = open_corpus(numbered_corpus(tmp_path_factory.mktemp("c"), [10] * (TOKENS // 10)))
    return part_of(corpus, name="c", split="train", holdout=0.0)


@pytest.fixture
def passes(space: TokenSpace) -> Passes:
    order = Order(TOKENS, choose_geometry(TOKENS, sequence_length=LENGTH), name="c", seed=0)
    return Passes(space, order, 0, None)


def positions(leg: Leg, samples: range) -> list[int]:
    """Return the tokens that samples of a leg hold."""
    places, found, packed = leg.locate(np.array(samples)), [], {}
    for epoch, pool, row in zip(
        places.epoch.tolist(), places.pool.tolist(), places.row.tolist(), strict=True
    ):
        if pool not in packed:
            packed[pool] = pack_pool(
                leg.space, leg.order, epoch=epoch, pool=pool, rule="best_fit", cuts=leg.cuts(pool)
            )
        rows = packed[pool]
        for shard, start, stop, _ in rows.pieces[rows.firsts[row] : rows.pasts[row]].tolist():
            if shard != PADDING:
                found += range(
                    int(leg.space.corpus.starts[shard]) + start, int(leg.space.corpus.starts[shard]) + stop
                )
    return found


@pytest.mark.parametrize("taken", [1, 2, 100, 511, 512, 513, 1700, 2999])
@pytest.mark.parametrize("length", [3, 7, 512, 700])
def test_what_is_left_of_an_epoch_is_what_was_not_taken(passes: Passes, taken: int, length: int) -> None:
    rest = passes.rest(taken, sequence_length=length)
    assert rest is not None
    served = positions(passes, range(taken)) + positions(rest, range(rest.num_samples))
    assert sorted(served) == list(range(TOKENS))


@pytest.mark.parametrize("inside", [0, 1, 5, 60])
def test_a_rest_may_be_cut_again_and_again(passes: Passes, inside: int) -> None:
    rest = passes.rest(101, sequence_length=7)
    assert rest is not None
    served = positions(passes, range(101)) + positions(rest, range(inside))
    again = rest.rest(inside, sequence_length=5)
    assert again is not None
    once_more = again.rest(9, sequence_length=11)
    assert once_more is not None
    served += positions(again, range(9)) + positions(once_more, range(once_more.num_samples))
    assert sorted(served) == list(range(TOKENS))


def test_between_two_epochs_nothing_is_left(passes: Passes) -> None:
    assert passes.rest(0, sequence_length=3) is None
    assert passes.rest(6000, sequence_length=3) is None


def test_places_on_a_rest_lead_back_to_their_samples(passes: Passes) -> None:
    rest = passes.rest(1700, sequence_length=7)
    assert rest is not None
    places = rest.locate(np.arange(rest.num_samples))
    back = [rest.sample_of(0, *at) for at in zip(places.pool.tolist(), places.row.tolist(), strict=True)]
    assert back == list(range(rest.num_samples))
    held = [pool for pool in range(12) if rest.holds(pool)]
    assert held == sorted(set(places.pool.tolist()))


def test_legs_that_hold_other_rows_have_other_identities(passes: Passes) -> None:
    legs = [passes, *(passes.rest(taken, sequence_length=n) for taken in (1, 2, 513) for n in (3, 4))]
    assert len({leg.identity for leg in legs if leg is not None}) == len(legs)
