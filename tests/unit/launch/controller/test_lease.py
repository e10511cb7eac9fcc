"""The lease of the leading replica, where the API server hangs, fails, or answers late."""

import threading

import pytest

from penstock.core import clock
from penstock.core.errors import PenstockError
from penstock.launch.controller.lease import LeaderLease

PATIENCE_S = 30.0
LEASE_S = 1.0


class Store:
    """What an API server keeps of one object; `before` is called ahead of each request."""

    def __init__(self):
        self.version, self.kept, self.before = 0, None, lambda: None

    def connect(self):
        self.before()
        return self

    def get(self, _api, _kind, _name):
        return self.kept

    def create(self, found):
        return self.replace(found)

    def replace(self, found):
        self.version += 1
        meta = {**found["metadata"], "resourceVersion": str(self.version)}
        self.kept = {**found, "metadata": meta}
        return True


class RacedStore(Store):
    """A store in which others write between our reading and our writing, some times."""

    def __init__(self, *writers):
        super().__init__()
        self.writers = list(writers)

    def replace(self, found):
        if not self.writers:
            return super().replace(found)
        super().replace({**self.kept, "spec": {**self.kept["spec"], "holderIdentity": self.writers.pop(0)}})
        return False


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def lease(store):
    found = LeaderLease("one", LEASE_S, store.connect)
    yield found
    found.stop()


def test_a_leader_whose_request_hangs_is_told_before_the_lease_runs_out(store, lease):
    answer, lost = threading.Event(), threading.Event()
    try:
        assert lease.acquire(threading.Event())
        store.before = answer.wait
        lease.keep(lambda _: lost.set())
        assert lost.wait(PATIENCE_S), "the request hangs until the test ends"
    finally:
        answer.set()


def test_a_lease_that_was_answered_too_late_is_lost_at_once(store, lease):
    store.before = lambda: clock.sleep(LEASE_S)
    assert lease.acquire(threading.Event())
    store.before, lost = lambda: None, threading.Event()
    lease.keep(lambda _: lost.set())
    assert lost.wait(PATIENCE_S)


def test_a_lost_lead_says_whether_another_replica_has_it_or_the_api_server_was_slow(store, lease):
    assert lease.acquire(threading.Event())
    told, said = threading.Event(), []

    def lose(why):
        said.append(why)
        told.set()

    def away():
        raise PenstockError("away")

    store.before = away
    lease.keep(lose)
    assert told.wait(PATIENCE_S)
    assert "the API server renewed it last" in said[0]
    assert "another replica leads" not in said[0]


def test_an_error_that_nobody_foresaw_ends_the_lead(store, lease):
    assert lease.acquire(threading.Event())

    def fail():
        raise RuntimeError("no such thing")

    store.before, lost = fail, threading.Event()
    lease.keep(lambda _: lost.set())
    assert lost.wait(PATIENCE_S)


def test_a_lead_outlives_an_api_server_that_is_away_for_a_moment(store, lease):
    away, lost = threading.Event(), []

    def fail_once():
        if not away.is_set():
            away.set()
            raise PenstockError("away")

    assert lease.acquire(threading.Event())
    store.before = fail_once
    lease.keep(lost.append)
    assert away.wait(PATIENCE_S)
    version = store.version
    while store.version == version and not lost:
        clock.sleep(0.01)
    lease.stop()
    assert not lost


@pytest.mark.parametrize(("writer", "leads"), [("one", True), ("two", False)])
def test_a_lease_that_was_written_meanwhile_is_read_again_before_the_lead_is_given_up(writer, leads):
    store = RacedStore()
    lease = LeaderLease("one", LEASE_S, store.connect)
    assert lease.take()
    store.writers.append(writer)
    assert lease.take() is leads


def test_a_lease_that_others_write_all_the_time_is_an_error_to_try_again_after():
    store = RacedStore()
    lease = LeaderLease("one", LEASE_S, store.connect)
    assert lease.take()
    store.writers += ["one"] * 3
    with pytest.raises(PenstockError, match="written by others"):
        lease.take()


def test_a_fraction_of_a_second_is_never_taken_from_the_duration_that_others_wait(store):
    lease = LeaderLease("one", 1.5, store.connect)
    assert lease.take()
    assert store.kept["spec"]["leaseDurationSeconds"] == 2, "others would take it while this one leads"


def test_a_signal_ends_the_wait_for_the_lease(store):
    LeaderLease("other", 1000.0, store.connect).acquire(threading.Event())
    stopped = threading.Event()
    stopped.set()
    assert not LeaderLease("one", LEASE_S, store.connect).acquire(stopped)


def test_a_replica_that_cannot_ask_for_the_lease_says_why_once_and_goes_on(store, lease, caplog):
    asked = []

    def refuse_at_first():
        asked.append(1)
        if len(asked) < 4:
            raise PenstockError("leases is forbidden")

    store.before = refuse_at_first
    assert lease.acquire(threading.Event())
    assert caplog.text.count("The lease cannot be taken, and is tried again: leases is forbidden") == 1
