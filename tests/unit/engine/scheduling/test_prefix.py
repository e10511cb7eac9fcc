"""Names of blocks say all that their content depends on."""

import pytest

from penstock.engine.request import Request
from penstock.engine.scheduling.blocks import BlockPool, find_prefix, name_blocks, names_of
from penstock.engine.scheduling.sequence import BlockTable, Sequence


def sequence_of(*prompt, blocks=(), **request):
    whole = Request(prompt=prompt, max_tokens=4, **request)
    tables = (BlockTable(list(blocks)),)
    return Sequence(id=0, request_id=0, answer=0, request=whole, tokens=list(prompt), tables=tables)


def names(*prompt, **request):
    return names_of(sequence_of(*prompt, **request), block_size=2, num_blocks=len(prompt) // 2)


def test_equal_beginnings_have_equal_names_and_no_others_do():
    assert names(1, 2, 3, 4)[:1] == names(1, 2, 5, 6)[:1]
    assert names(1, 2, 3, 4)[1] != names(1, 2, 5, 6)[1]
    # the same tokens after something else
    assert names(1, 2, 3, 4)[1] != names(5, 6, 3, 4)[1]
    assert names(1, 2)[0] != names(2, 1)[0]


def test_adapters_do_not_share():
    assert len({names(1, 2, adapter=adapter)[0] for adapter in (None, "a", "b")}) == 3


def pool_with(*tokens):
    pool = BlockPool(8)
    sequence = sequence_of(*tokens, blocks=[pool.take() for _ in range(len(tokens) // 2)])
    sequence.num_computed = len(tokens)
    name_blocks(pool, sequence, block_size=2, since=0)
    return pool, sequence.tables[0].blocks


def found(pool, sequence):
    return find_prefix(pool, sequence, block_size=2).blocks[0]


def test_the_longest_common_beginning_is_found():
    pool, blocks = pool_with(1, 2, 3, 4, 5, 6)
    assert found(pool, sequence_of(1, 2, 3, 4, 9, 9, 9)) == blocks[:2]
    assert found(pool, sequence_of(9, 2, 3, 4)) == []


def test_the_last_token_is_always_computed():
    pool, blocks = pool_with(1, 2, 3, 4)
    assert found(pool, sequence_of(1, 2, 3, 4)) == blocks[:1]
    assert found(pool, sequence_of(1, 2, 3, 4, 5)) == blocks[:2]


def test_a_block_with_a_hole_before_it_is_not_found():
    pool, blocks = pool_with(1, 2, 3, 4)
    pool.release(blocks[:1])
    while pool.find(names(1, 2)[0]) is not None:
        pool.take()
    assert found(pool, sequence_of(1, 2, 3, 4, 5)) == []


def grouped(windows, *, missing=()):
    """A pool with 8 blocks of 2 tokens in each of some groups, but for those (group, index)."""
    pool = BlockPool(99)
    tables = tuple(BlockTable([pool.take() for _ in range(8)]) for _ in windows)
    sequence = sequence_of(*range(17))
    sequence.tables, sequence.num_computed = tables, 16
    name_blocks(pool, sequence, block_size=2, since=0)
    pool.forget(tables[group].blocks[index] for group, index in missing)
    prefix = find_prefix(pool, sequence_of(*range(17)), block_size=2, windows=windows)
    for table, blocks in zip(tables, prefix.blocks, strict=True):
        assert blocks == table.blocks[prefix.num_blocks - len(blocks) : prefix.num_blocks]
    return prefix.num_blocks, tuple(map(len, prefix.blocks))


@pytest.mark.parametrize(
    ("missing", "count", "held"),
    [
        ([], 8, (8, 2)),  # token 16 sees 13 to 15, from the middle of a block on
        ([(1, 5)], 8, (8, 2)),
        ([(1, 6)], 6, (6, 2)),
        ([(1, 7), (1, 5)], 5, (5, 2)),
        ([(0, 7)], 7, (7, 2)),
        ([(0, 3)], 3, (3, 2)),
        ([(0, 7), (1, 6), (1, 4)], 4, (4, 2)),
        ([(1, 0), (1, 2), (1, 4), (1, 6)], 0, (0, 0)),
    ],
)
def test_a_group_with_a_window_needs_the_blocks_that_the_next_token_sees(missing, count, held):
    assert grouped((None, 4), missing=missing) == (count, held)


def test_what_one_group_lacks_shortens_the_prefix_of_all():
    # group 0 needs block 7 for a prefix of 8; without it, group 1 lacks one of a prefix of 7
    assert grouped((2, 6), missing=[(0, 7), (1, 4)]) == (4, (1, 3))
    assert grouped((2, 6), missing=[(0, 7), (1, 4), (0, 3)]) == (3, (1, 3))


def test_only_who_wants_a_score_of_every_token_finds_nothing():
    pool, blocks = pool_with(1, 2, 3, 4)
    assert found(pool, sequence_of(1, 2, 3, 4, 5, task="embed")) == blocks
    scored = sequence_of(1, 2, 3, 4, 5, num_prompt_logprobs=0)
    assert found(pool, scored) == []
    scored.tokens.append(6)  # its prompt was scored before it was pre-empted
    assert found(pool, scored) == blocks


@pytest.mark.parametrize(
    ("continuations", "num_found"), [((), 2), (((9,),), 2), (((5, 9),), 1), (((9,), (3, 4, 5, 9)), 0)]
)
def test_a_score_finds_what_stands_before_its_continuations(continuations, num_found):
    pool, blocks = pool_with(1, 2, 3, 4)
    scored = sequence_of(1, 2, 3, 4, 5, task="score", continuations=continuations)
    assert found(pool, scored) == blocks[:num_found]


def test_only_blocks_that_are_full_and_computed_get_a_name():
    pool = BlockPool(4)
    sequence = sequence_of(1, 2, 3, 4, blocks=[pool.take(), pool.take()])
    sequence.num_computed = 3
    name_blocks(pool, sequence, block_size=2, since=0)
    assert pool.name_of(sequence.tables[0].blocks[0]) is not None
    assert pool.name_of(sequence.tables[0].blocks[1]) is None
