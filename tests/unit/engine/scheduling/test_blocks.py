"""Blocks are counted, found again by what they hold, and given away least recently used first."""

from penstock.engine.scheduling.blocks import BlockPool


def test_all_blocks_are_given_once():
    pool = BlockPool(3)
    assert sorted(pool.take() for _ in range(3)) == [0, 1, 2]
    assert (pool.num_free, pool.num_used) == (0, 3)


def test_a_named_block_is_found_after_its_last_user_left():
    pool = BlockPool(2)
    block = pool.take()
    pool.name(block, b"begin")
    pool.release([block])
    assert pool.num_free == 2
    assert pool.find(b"begin") == block
    pool.share(block)
    assert (pool.num_free, pool.users(block)) == (1, 1)


def test_a_shared_block_is_free_when_both_users_left():
    pool = BlockPool(1)
    block = pool.take()
    pool.name(block, b"begin")
    pool.share(block)
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 1


def test_empty_blocks_go_before_idle_ones_and_ends_before_beginnings():
    pool = BlockPool(4)
    first, second, third = pool.take(), pool.take(), pool.take()
    for block, name in ((first, b"1"), (second, b"12"), (third, b"123")):
        pool.name(block, name)
    pool.release([first, second])
    pool.release([third])
    assert pool.take() not in (first, second, third)
    # those of the first release left earlier; of these the end of the text goes before its beginning
    assert [pool.take() for _ in range(3)] == [second, first, third]
    assert [pool.find(name) for name in (b"1", b"12", b"123")] == [None, None, None]


def test_the_first_of_two_equal_blocks_is_the_one_found():
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    pool.name(first, b"same")
    pool.name(second, b"same")
    assert pool.find(b"same") == first
    assert pool.name_of(second) is None
    pool.release([second])
    assert pool.find(b"same") == first


def test_nothing_is_kept_that_was_not_to_be_kept():
    pool = BlockPool(1, keep_idle=False)
    block = pool.take()
    pool.name(block, b"begin")
    assert pool.find(b"begin") == block
    pool.release([block])
    assert pool.find(b"begin") is None
    assert pool.num_free == 1
