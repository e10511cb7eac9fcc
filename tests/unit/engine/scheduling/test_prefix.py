"""Names of blocks say all that their content depends on."""

import pytest

from penstock.engine.request import Request
from penstock.engine.scheduling.blocks import BlockPool, find_prefix, name_blocks, names_of
from penstock.engine.scheduling.sequence import Sequence


def sequence_of(*prompt, blocks=(), **request):
    whole = Request(prompt=prompt, max_tokens=4, **request)
    return Sequence(id=0, request_id=0, answer=0, request=whole, tokens=list(prompt), blocks=list(blocks))


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
    return pool, sequence.blocks


def test_the_longest_common_beginning_is_found():
    pool, blocks = pool_with(1, 2, 3, 4, 5, 6)
    assert find_prefix(pool, sequence_of(1, 2, 3, 4, 9, 9, 9), block_size=2) == blocks[:2]
    assert find_prefix(pool, sequence_of(9, 2, 3, 4), block_size=2) == []


def test_the_last_token_is_always_computed():
    pool, blocks = pool_with(1, 2, 3, 4)
    assert find_prefix(pool, sequence_of(1, 2, 3, 4), block_size=2) == blocks[:1]
    assert find_prefix(pool, sequence_of(1, 2, 3, 4, 5), block_size=2) == blocks[:2]


def test_a_block_with_a_hole_before_it_is_not_found():
    pool, blocks = pool_with(1, 2, 3, 4)
    pool.release(blocks[:1])
    while pool.find(names(1, 2)[0]) is not None:
        pool.take()
    assert find_prefix(pool, sequence_of(1, 2, 3, 4, 5), block_size=2) == []


def test_only_who_wants_a_score_of_every_token_finds_nothing():
    pool, blocks = pool_with(1, 2, 3, 4)
    assert find_prefix(pool, sequence_of(1, 2, 3, 4, 5, task="embed"), block_size=2) == blocks
    scored = sequence_of(1, 2, 3, 4, 5, num_prompt_logprobs=0)
    assert find_prefix(pool, scored, block_size=2) == []
    scored.tokens.append(6)  # its prompt was scored before it was pre-empted
    assert find_prefix(pool, scored, block_size=2) == blocks


@pytest.mark.parametrize(
    ("continuations", "num_found"), [((), 2), (((9,),), 2), (((5, 9),), 1), (((9,), (3, 4, 5, 9)), 0)]
)
def test_a_score_finds_what_stands_before_its_continuations(continuations, num_found):
    pool, blocks = pool_with(1, 2, 3, 4)
    scored = sequence_of(1, 2, 3, 4, 5, task="score", continuations=continuations)
    assert find_prefix(pool, scored, block_size=2) == blocks[:num_found]


def test_only_blocks_that_are_full_and_computed_get_a_name():
    pool = BlockPool(4)
    sequence = sequence_of(1, 2, 3, 4, blocks=[pool.take(), pool.take()])
    sequence.num_computed = 3
    name_blocks(pool, sequence, block_size=2, since=0)
    assert pool.name_of(sequence.blocks[0]) is not None
    assert pool.name_of(sequence.blocks[1]) is None
