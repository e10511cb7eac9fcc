"""A packed pool: rows of pieces, padding in one place only, documents that go on marked."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from penstock.core.arrays import Int64
from penstock.core.errors import UsageError
from penstock.data import packing
from penstock.data.corpus.open import open_corpus
from penstock.data.order.holdout import TokenSpace, part_of
from penstock.data.order.permutation import choose_geometry
from penstock.data.order.pool import PackedPool, WholePools, pack_pool
from penstock.data.order.row_order import Order
from penstock.data.packing import PACKERS, PADDING_RULES
from penstock.data.types import PADDING, Pieces
from penstock.testing.corpora import numbered_corpus

LENGTH = 4
LENGTHS = [1 + (7 * i) % 23 for i in range(450)]  # six pools, the last one short
RULES = pytest.mark.parametrize("rule", [rule for rule in PACKERS if rule not in PADDING_RULES])


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> TokenSpace:
    corpus = open_corpus(numbered_corpus(tmp_path_factory.mktemp("c"), LENGTHS))
    return part_of(corpus, name="c", split="train", holdout=0.0)


@pytest.fixture(scope="module")
def order(space: TokenSpace) -> Order:
    geometry = choose_geometry(space.num_tokens, sequence_length=LENGTH)
    return Order(space.num_tokens, geometry, name="c", seed=0)


def document_a_row(lengths: Int64, **_: int) -> Pieces:
    """Packing rule that gives every document a row of its own."""
    numbers = np.arange(len(lengths))
    return Pieces(numbers, np.zeros_like(numbers), lengths, numbers + 1)


def test_a_padding_rule_packs_by_its_own_function(
    space: TokenSpace, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKERS._rows, "document_a_row", f"{__name__}:document_a_row")  # type: ignore[attr-defined]
    monkeypatch.setattr(packing, "PADDING_RULES", ("whole", "document_a_row"))
    rows = {rule: WholePools(space, rule, "truncate").rows(order).sum() for rule in packing.PADDING_RULES}
    assert rows["document_a_row"] == len(LENGTHS) > rows["whole"]


@pytest.mark.parametrize(
    ("rule", "message"), [("hole", "Unknown packing rule"), ("concat", "serves documents of any length")]
)
def test_a_rule_that_does_not_pad_is_refused_for_whole_documents(
    space: TokenSpace, rule: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        WholePools(space, rule, "truncate")


def rows_of(packed: PackedPool) -> list[list[list[int]]]:
    bounds = zip(packed.firsts, packed.pasts, strict=True)
    return [packed.pieces[first:past].tolist() for first, past in bounds]


@RULES
@pytest.mark.parametrize("epoch", [0, 1])
def test_every_row_holds_its_length_and_only_the_last_of_an_epoch_is_padded(
    space: TokenSpace, order: Order, rule: str, epoch: int
) -> None:
    assert order.num_pools > 2
    assert space.num_tokens % LENGTH
    padded = []
    for pool in range(order.num_pools):
        packed = pack_pool(space, order, epoch=epoch, pool=pool, rule=rule)
        rows = rows_of(packed)
        assert len(rows) == order.rows_in_pool(pool)
        for number, row in enumerate(rows):
            assert sum(stop - start for _, start, stop, _ in row) == LENGTH
            if any(shard == PADDING for shard, *_ in row):
                padded.append((pool, number, row[-1][0]))
    assert padded == [(order.num_pools - 1, order.rows_in_pool(order.num_pools - 1) - 1, PADDING)]


@RULES
def test_a_piece_goes_on_unless_its_document_ends_there(space: TokenSpace, order: Order, rule: str) -> None:
    corpus, ends = space.corpus, set(np.cumsum(LENGTHS).tolist())
    shard_starts = np.cumsum([0, *(entry.tokens for entry in corpus.manifest.shards)])
    marked = 0
    for pool in range(order.num_pools):
        for shard, _, stop, goes_on in pack_pool(space, order, epoch=1, pool=pool, rule=rule).pieces.tolist():
            if shard != PADDING:
                assert bool(goes_on) == (shard_starts[shard] + stop not in ends)
                marked += goes_on
    assert marked, "some document is split"


@RULES
def test_rows_are_shuffled_so_that_one_long_document_does_not_arrive_in_a_run(
    tmp_path: Path, rule: str
) -> None:
    corpus = open_corpus(numbered_corpus(tmp_path, [4000]))
    whole = part_of(corpus, name="c", split="train", holdout=0.0)
    order = Order(4000, choose_geometry(4000, sequence_length=40), name="c", seed=0)
    starts = [row[0][1] for row in rows_of(pack_pool(whole, order, epoch=0, pool=0, rule=rule))]
    assert sorted(starts) == list(range(0, 4000, 40))
    assert starts[:-1] != sorted(starts[:-1])
    assert sum(b - a == 40 for a, b in pairwise(starts)) < 10


@RULES
def test_the_same_pool_of_another_epoch_is_another(space: TokenSpace, order: Order, rule: str) -> None:
    one, same, other = (pack_pool(space, order, epoch=e, pool=0, rule=rule).pieces for e in (0, 0, 1))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


@RULES
@pytest.mark.parametrize(("tokens", "wide"), [("1e9", False), ("1e12", True)])
def test_places_in_a_shard_are_kept_whole_whether_they_fit_in_32_bits_or_not(
    rule: str, tokens: str, wide: bool
) -> None:
    corpus = open_corpus(f"synthetic:tokens={tokens},mean_document=500,shards=1")
    whole = part_of(corpus, name="c", split="train", holdout=0.0)
    order = Order(whole.num_tokens, choose_geometry(whole.num_tokens, sequence_length=64), name="c", seed=0)
    packed = pack_pool(whole, order, epoch=0, pool=0, rule=rule)
    assert (packed.pieces.dtype == np.int64) == wide == (packed.pieces.max() >= 2**31)
    ranges = sorted(order.blocks.of_pool(0, 0))
    starts, stops = packed.pieces[:, 1].tolist(), packed.pieces[:, 2].tolist()
    joined = sorted(zip(starts, stops, strict=True))
    assert all(early[1] <= late[0] for early, late in pairwise(joined))
    assert sum(stops) - sum(starts) == sum(stop - start for start, stop in ranges) == order.tokens_in_pool(0)
    row, (low, high) = next(packed.rows_with(0, starts[9], stops[9]))
    assert packed.firsts[row] <= 9 < packed.pasts[row]
    assert (low, high) == (starts[9], stops[9])
    assert list(packed.rows_with(0, 2**50, 2**50 + 1)) == []
