"""Ranks of one attempt meet in a store that keeps what earlier attempts wrote."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import FileStore, HashStore, TCPStore

from penstock.core.env import Ranks
from penstock.core.errors import PenstockError
from penstock.parallel.rendezvous import meet


def as_rank(rank, world_size):
    return Ranks(rank=rank, world_size=world_size, local_rank=0)


def come(store, ranks, world_size, timeout_s=20.0):
    """Let ranks meet, each in a thread; return what each found or was told."""

    def one(rank):
        try:
            return meet(store, as_rank(rank, world_size), timeout_s=timeout_s)
        except PenstockError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one, ranks))


def read(store, key):
    store.set_timeout(timedelta(seconds=0.2))
    return store.get(key).decode()


@pytest.fixture
def store():
    return HashStore()


def test_all_ranks_of_an_attempt_read_what_any_of_them_wrote(store):
    parts = come(store, range(5), 5)
    for rank, part in enumerate(parts):
        part.set(f"address-of-{rank}", str(rank))
    for part in parts:
        assert [read(part, f"address-of-{rank}") for rank in range(5)] == list("01234")


def test_nothing_of_an_earlier_attempt_is_seen(store):
    for part in come(store, range(3), 3):
        part.set("address", "of the dead")
    for part in come(store, range(3), 3):
        assert not part.check(["address"])


@pytest.mark.parametrize("died", [[0], [1], [2], [0, 1], [1, 2]])
def test_ranks_killed_before_they_met_hold_nobody_up(store, died):
    come(store, died, 3, timeout_s=0.3)
    assert not [part for part in come(store, range(3), 3) if isinstance(part, PenstockError)]


def test_an_attempt_may_have_more_or_fewer_ranks_than_the_one_before(store):
    for world_size in (4, 2, 3):
        parts = come(store, range(world_size), world_size)
        parts[0].set("size", str(world_size))
        assert {read(part, "size") for part in parts} == {str(world_size)}


def test_a_rank_that_does_not_come_is_named_and_the_others_give_up_too(store):
    first, second = come(store, [0, 2], 3, timeout_s=0.5)
    assert "1 of 3 ranks did not join within 0 s (got [1])" in str(first)
    second.set("the second rank is there, and learns of it in its next collective", "")
    (alone,) = come(store, [1], 3, timeout_s=0.3)
    assert "had no answer from the first rank in 0 s" in str(alone)


def test_ranks_with_a_file_of_their_own_attempt_do_not_wait_for_each_other(tmp_path):
    (alone,) = come(FileStore(str(tmp_path / "attempt"), 3), [2], 3, timeout_s=0.3)
    assert isinstance(alone, FileStore)


def test_a_store_that_ends_while_ranks_wait_is_an_error_of_one_paragraph():
    kept = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    asked = TCPStore("127.0.0.1", kept.port, None, False, timedelta(seconds=5), wait_for_workers=False)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(meet, asked, as_rank(1, 2), timeout_s=30.0)
        while not kept.check(["penstock/arrivals/1"]):
            pass
        del kept
        with pytest.raises(PenstockError, match="Rank 1 of 2 lost the rendezvous store"):
            waiting.result()
