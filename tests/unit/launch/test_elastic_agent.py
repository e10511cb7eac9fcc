"""A node of an elastic run and its rendezvous, on real stores: what ends the node, and what ends all."""

import multiprocessing
import os
import signal
import socket
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousJoinOp

from penstock.core.files import exclusive
from penstock.launch import elastic_agent, supervise
from penstock.launch.attempt import WarmProcess
from penstock.launch.elastic_agent import ElasticNode, RendezvousGone, run_elastic_node, start_store
from penstock.launch.job_folder import JobFolder
from penstock.launch.local import EXIT_STOPPED
from penstock.launch.spec import node_range
from penstock.launch.supervise import Act
from tests.launched import wait_until
from tests.unit.launch.test_spec import make_spec

HERE = "127.0.0.1"
LITTLE_S = 0.3

# Python 3.12 warns of a fork where other tests have left library threads; these children use none.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def explain(error):
    raise error


@pytest.fixture(autouse=True)
def _signals():
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def folder(tmp_path):
    found = JobFolder(tmp_path / "run")
    found.make()
    return found


@pytest.fixture
def spec(folder):
    return make_spec(nodes=node_range("2:3"), run_dir=str(folder.run))


@pytest.fixture
def store():
    process, port = start_store(HERE)
    yield port
    process.kill()
    process.join()
    process.close()


@pytest.fixture
def warm(folder):
    found = WarmProcess(lambda: 0, explain, folder.log_of)
    yield found
    found.close()


def node_of(spec, folder, warm, port, *, number=0):
    return ElasticNode(
        spec, folder, node=number, host=HERE, port=port, warm=warm, join_s=1, address=f"node-{number}"
    )


def test_a_node_that_comes_after_the_run_is_gone_says_so_and_asks_to_be_tried_again(
    spec, folder, monkeypatch
):
    monkeypatch.setattr(elastic_agent, "_STORE_TIMEOUT_S", 0.5)
    with socket.socket() as taken:
        taken.bind((HERE, 0))  # and does not listen
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousGone, match=r"did not answer within 0\.5 s") as error:
            run_elastic_node(
                spec,
                folder,
                node=7,
                host=HERE,
                port=port,
                work=lambda: 0,
                explain=explain,
                gone_code=EXIT_STOPPED,
            )
    assert error.value.exit_code == EXIT_STOPPED
    (event,) = folder.events()
    assert (event["node"], event["code"]) == (7, EXIT_STOPPED)
    assert "\n" not in str(error.value)


def test_a_node_that_waits_in_vain_does_not_close_the_rendezvous_for_others(spec, folder, warm, store):
    assert node_of(spec, folder, warm, store).run() == 1
    assert "fewer than 2 nodes came within 1 s" in folder.events()[-1]["cause"]
    other = node_of(spec, folder, warm, store, number=1)
    assert not other._handler.is_closed()
    assert other.run() == 1, "it waits for itself, too"


def test_a_node_of_a_run_that_is_to_stop_ends_it_for_all(spec, folder, warm, store):
    folder.ask_to_stop()
    assert node_of(spec, folder, warm, store).run() == EXIT_STOPPED
    assert "stopped by request" in folder.events()[-1]["cause"]
    assert node_of(spec, folder, warm, store, number=1).run() == EXIT_STOPPED


def test_a_request_to_stop_reaches_a_node_that_waits_for_others(spec, folder, warm, store):
    node = ElasticNode(spec, folder, node=0, host=HERE, port=store, warm=warm, join_s=60, address="node-0")
    asked = threading.Timer(0.5, folder.ask_to_stop)
    asked.start()
    assert node.run() == EXIT_STOPPED
    asked.join()
    assert "stopped by request" in folder.events()[-1]["cause"]
    other = node_of(spec, folder, warm, store, number=1)
    assert (other._handler.is_closed(), other.run()) == (True, EXIT_STOPPED)


def test_a_node_that_leaves_while_it_waits_is_no_longer_waited_for(folder, warm, store, monkeypatch):
    monkeypatch.setattr(elastic_agent, "_LAST_CALL_S", 1)
    monkeypatch.setattr(elastic_agent, "_MISSED", 100)  # not by its heartbeats
    spec = make_spec(nodes=node_range("1:2"), run_dir=str(folder.run))
    stays, comes = [
        ElasticNode(
            spec, folder, node=number, host=HERE, port=store, warm=warm, join_s=60, address=f"node-{number}"
        )
        for number in (0, 1)
    ]
    trains = stays._handler
    trains.next_rendezvous()

    def tell():
        wait_until(trains.num_nodes_waiting, "a node that waits")
        os.kill(os.getpid(), signal.SIGTERM)

    telling = threading.Thread(target=tell)
    telling.start()
    assert comes.run() == EXIT_STOPPED
    telling.join()
    time.sleep(1.1)  # for so long it believes what it knew
    assert trains.num_nodes_waiting() == 0
    trains._stop_heartbeats()


TWO_RANKS = SimpleNamespace(
    rank=0, world_size=2, bootstrap_store_info=SimpleNamespace(master_addr=HERE, master_port=1)
)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("joins", "waiting"),
    [
        pytest.param(0, 1, id="while it stops for one that joins"),
        pytest.param(3, 1, id="while one that would join has to wait"),
        pytest.param(0, 0, id="while it trains"),
    ],
)
def test_ranks_that_wait_for_a_lost_node_are_killed_before_the_grace_is_over(
    folder, store, monkeypatch, joins, waiting
):
    monkeypatch.setattr(elastic_agent, "_AFTER_LOSS_S", 0.3)
    spec = make_spec(nodes=node_range("1:2"), run_dir=str(folder.run), grace_s=60.0, idle_starts=3)
    with closing(WarmProcess(partial(trains, folder.run), explain, folder.log_of)) as warm:
        node = node_of(spec, folder, warm, store)
        node._state = replace(node._state, joins=joins)
        monkeypatch.setattr(node, "_handler", Rendezvous(waiting, is_lost=folder.trained_at))
        assert node._attempt(TWO_RANKS).act is Act.START
    (kill,) = [event for event in folder.events() if event["event"] == "kill"]
    assert kill["cause"] == "the processes did not stop in time"


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("told", "end"), [("", (Act.START, 0)), ("SIGTERM", (Act.FINISH, EXIT_STOPPED))])
def test_ranks_whose_peers_left_before_they_met_have_nothing_to_save(folder, store, monkeypatch, told, end):
    monkeypatch.setattr(elastic_agent, "_AFTER_LOSS_S", 60.0)
    spec = make_spec(nodes=node_range("1:2"), run_dir=str(folder.run), grace_s=60.0)
    with closing(WarmProcess(hangs, explain, folder.log_of)) as warm:
        node = node_of(spec, folder, warm, store)
        node._signals.name = told
        monkeypatch.setattr(node, "_handler", Rendezvous(0, is_lost=lambda: True))
        decision = node._attempt(TWO_RANKS)
    assert (decision.act, decision.code) == end
    assert decision.pause_s == 0, "no failure"


class Rendezvous:
    """The rendezvous of two nodes, as one of them sees it, until the other is lost and later."""

    def __init__(self, num_waiting, is_lost):
        self._num_waiting, self._is_lost = num_waiting, is_lost
        self._state_holder = self

    def num_nodes_waiting(self):
        return self._num_waiting

    @property
    def state(self):
        return SimpleNamespace(participants=range(1 if self._is_lost() else 2))


def hangs():
    """Work of a rank that waits for its peers, and looks at no signal."""
    time.sleep(60)
    return 0


def trains(run):
    """Work of the first rank after all have met; it looks at no signal either."""
    with exclusive(run, purpose="penstock train"):
        return hangs()


@pytest.mark.parametrize(
    ("nodes", "leaving", "world"),
    [
        pytest.param("1:2", 0, (0, 1), id="not as rank 1 of 1"),
        pytest.param("2", 1, (0, 2), id="not as the only one of 2"),
    ],
)
def test_a_round_that_a_node_left_before_its_ranks_were_read_is_not_started(
    folder, warm, store, monkeypatch, nodes, leaving, world
):
    monkeypatch.setattr(elastic_agent, "_LAST_CALL_S", 600)  # both meet, however late the second comes
    spec = make_spec(nodes=node_range(nodes), run_dir=str(folder.run))
    leaves, stays, comes = [
        ElasticNode(
            spec, folder, node=number, host=HERE, port=store, warm=warm, join_s=600, address=f"node-{number}"
        )
        for number in (leaving, 1 - leaving, 2)
    ]

    def meet():
        if leaving == 0:  # and tell the others where the first rank listens
            leaves._handler.next_rendezvous()
        else:  # without waiting for that
            deadline = leaves._handler._get_deadline(timedelta(seconds=600))
            leaves._handler._op_executor.run(_RendezvousJoinOp(), deadline)

    first = threading.Thread(target=meet)
    second = threading.Thread(target=comes._handler.next_rendezvous)
    read, state = stays._handler._get_world, stays._handler._state_holder

    def read_late():
        monkeypatch.setattr(stays._handler, "_get_world", read)
        monkeypatch.setattr(stays._handler._settings.timeout, "_last_call", timedelta(seconds=1))  # alone
        first.join()
        leaves._leave()
        wait_until(lambda: state.sync() or len(state.state.participants) == 1, "the news of it")
        if world == (0, 2):
            second.start()
        return read()

    monkeypatch.setattr(stays._handler, "_get_world", read_late)
    first.start()
    info = stays._join()
    stays._handler._stop_heartbeats()
    if world == (0, 2):
        second.join()
        comes._handler._stop_heartbeats()
    assert (info.rank, info.world_size) == world
    assert "has left since" in folder.events()[-1]["cause"]


def test_a_pod_that_waits_in_vain_ends_with_the_code_that_is_not_counted(spec, folder, warm, store):
    node = ElasticNode(
        spec, folder, node=0, host=HERE, port=store, warm=warm, join_s=1, gone_code=75, address="node-0"
    )
    assert node.run() == 75


def until_told():
    """Work of a rank that trains until it is asked to stop."""
    signal.sigwait({signal.SIGTERM})
    return EXIT_STOPPED


@contextmanager
def running(spec, folder, port, *, number):
    """Run a node in a process until the block ends, and ask it to leave then."""

    def run():
        code = run_elastic_node(
            spec, folder, node=number, host=HERE, port=port, work=until_told, explain=explain,
            address=f"node-{number}", join_pause_s=0.2,
        )  # fmt: skip
        os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    try:
        yield
        process.terminate()
        process.join(60)
        assert process.exitcode == EXIT_STOPPED
    finally:
        process.kill()
        process.join()
        process.close()


def test_nodes_that_join_and_go_again_wait_longer_and_longer(folder, store, monkeypatch):
    """On a busy machine a node that waits may miss a round: the first starts alone, and lets it in later."""
    monkeypatch.setattr(elastic_agent, "_LAST_CALL_S", 1)  # each start alone waits so long for others
    monkeypatch.setattr(dynamic_rendezvous, "_delay", lambda **_: time.sleep(LITTLE_S / 3))
    spec = make_spec(nodes=node_range("1:2"), run_dir=str(folder.run), idle_starts=100)

    def of_first(kind):
        return [event for event in folder.events() if (event["event"], event["node"]) == (kind, 0)]

    def has_started(num_nodes, times):
        starts = [event["nodes"] for event in of_first("start") if "nodes" in event]
        return starts.count(2) == times and starts[-1:] == [num_nodes]

    with running(spec, folder, store, number=0):
        wait_until(lambda: has_started(1, times=0), "a start alone")
        for joins in (1, 2, 3):
            with running(spec, folder, store, number=joins):
                wait_until(lambda joins=joins: has_started(2, times=joins), "a start of two")
            wait_until(lambda joins=joins: has_started(1, times=joins), "a start alone again")
    assert [event["cause"] for event in of_first("delay_joins")] == [
        "2 joins in a row lasted less than 10m00s: the next nodes wait 0.2 s",
        "3 joins in a row lasted less than 10m00s: the next nodes wait 0.4 s",
    ]


def test_a_node_tells_its_supervisor_how_long_its_ranks_ran(folder, store, monkeypatch):
    told = []

    def advance(state, event, policy):
        told.append(event)
        return supervise.advance(state, event, policy)

    monkeypatch.setattr(elastic_agent, "advance", advance)
    spec = make_spec(nodes=node_range("1:2"), run_dir=str(folder.run))
    with closing(WarmProcess(a_little_while, explain, folder.log_of)) as warm:
        node = ElasticNode(
            spec, folder, node=0, host=HERE, port=store, warm=warm, join_s=60, address="node-0"
        )
        assert node.run() == 0
    (ended,) = [event for event in told if isinstance(event, supervise.Ended)]
    assert ended.ran_s > LITTLE_S


def a_little_while():
    """Work of a rank that takes some time."""
    time.sleep(LITTLE_S)
    return 0
