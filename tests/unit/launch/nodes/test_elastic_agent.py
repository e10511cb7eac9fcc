"""A node of an elastic run and its rendezvous, on a real server: what ends the node, and what ends all."""

import multiprocessing
import os
import signal
import socket
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial

import pytest

from penstock.core.files import exclusive
from penstock.launch import supervise
from penstock.launch.job_folder import JobFolder
from penstock.launch.local import EXIT_STOPPED
from penstock.launch.nodes import elastic_agent
from penstock.launch.nodes.attempt import WarmProcess
from penstock.launch.nodes.elastic_agent import ElasticNode, NodeSettings, run_elastic_node
from penstock.launch.rendezvous import client
from penstock.launch.rendezvous.client import RendezvousClosed, RendezvousGone
from penstock.launch.rendezvous.membership import RendezvousInfo, View
from penstock.launch.rendezvous.server import start_server
from penstock.launch.rendezvous.signed import new_key
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


KEY = new_key()


@contextmanager
def serving(nodes, *, last_call_s=1.0):
    """Serve the rendezvous of a run; yield its port."""
    process, port = start_server(nodes, key=KEY, address=HERE, last_call_s=last_call_s)
    try:
        yield port
    finally:
        process.kill()
        process.join()
        process.close()


@pytest.fixture
def store(spec):
    with serving(spec.nodes) as port:
        yield port


@pytest.fixture
def warm(folder):
    found = WarmProcess(lambda: 0, explain, folder.log_of)
    yield found
    found.close()


def node_of(spec, folder, warm, port, *, number=0):
    return ElasticNode(spec, folder, settings_of(port, number=number), warm)


def settings_of(port, *, number=0, **more):
    given = {"join_s": 1, "address": f"node-{number}", **more}
    return NodeSettings(node=number, host=HERE, port=port, key=KEY, **given)


def test_the_key_is_not_in_the_text_of_the_settings():
    assert KEY not in repr(settings_of(1))


def test_a_node_that_comes_after_the_run_is_gone_says_so_and_asks_to_be_tried_again(
    spec, folder, monkeypatch
):
    monkeypatch.setattr(client, "_ANSWER_S", 0.5)
    with socket.socket() as taken:
        taken.bind((HERE, 0))  # and does not listen
        port = taken.getsockname()[1]
        settings = settings_of(port, number=7, gone_code=EXIT_STOPPED)
        with pytest.raises(RendezvousGone, match=r"did not answer within 0\.5 s") as error:
            run_elastic_node(spec, folder, settings, lambda: 0, explain)
    assert error.value.exit_code == EXIT_STOPPED
    (event,) = folder.events()
    assert (event["node"], event["code"]) == (7, EXIT_STOPPED)
    assert "\n" not in str(error.value)


def test_a_node_that_waits_in_vain_does_not_close_the_rendezvous_for_others(spec, folder, warm, store):
    assert node_of(spec, folder, warm, store).run() == 1
    assert "fewer than 2 nodes came within 1 s" in folder.events()[-1]["cause"]
    assert node_of(spec, folder, warm, store, number=1).run() == 1, "it waits for itself, too"
    assert "fewer than 2 nodes came within 1 s" in folder.events()[-1]["cause"]


def test_a_node_of_a_run_that_is_to_stop_ends_it_for_all(spec, folder, warm, store):
    folder.ask_to_stop()
    assert node_of(spec, folder, warm, store).run() == EXIT_STOPPED
    assert "stopped by request" in folder.events()[-1]["cause"]
    assert node_of(spec, folder, warm, store, number=1).run() == EXIT_STOPPED


def test_a_request_to_stop_reaches_a_node_that_waits_for_others(spec, folder, warm, store):
    node = ElasticNode(spec, folder, settings_of(store, join_s=60), warm)
    asked = threading.Timer(0.5, folder.ask_to_stop)
    asked.start()
    assert node.run() == EXIT_STOPPED
    asked.join()
    assert "stopped by request" in folder.events()[-1]["cause"]
    other = node_of(spec, folder, warm, store, number=1)._rendezvous
    with pytest.raises(RendezvousClosed) as closed:
        other.join(1)
    other.end()
    assert closed.value.code == EXIT_STOPPED


def test_a_node_that_leaves_while_it_waits_is_no_longer_waited_for(folder, warm):
    spec = make_spec(nodes=node_range("1:2"), run_dir=str(folder.run))
    with serving(spec.nodes, last_call_s=0.0) as port:
        stays = node_of(spec, folder, warm, port)
        comes = ElasticNode(spec, folder, settings_of(port, number=1, join_s=60), warm)
        trains = stays._rendezvous
        trains.join(60)

        def tell():
            wait_until(lambda: trains.heartbeat().num_waiting, "a node that waits")
            os.kill(os.getpid(), signal.SIGTERM)

        telling = threading.Thread(target=tell)
        telling.start()
        assert comes.run() == EXIT_STOPPED
        telling.join()
        assert trains.heartbeat() == View(num_waiting=0, num_present=1)
        trains.end()


TWO_RANKS = RendezvousInfo(round=0, index=0, num_nodes=2, address=HERE, port=1)


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
        sees(node, Others(waiting, is_lost=folder.trained_at))
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
        sees(node, Others(0, is_lost=lambda: True))
        decision = node._attempt(TWO_RANKS)
    assert (decision.act, decision.code) == end
    assert decision.pause_s == 0, "no failure"


class Others:
    """The rendezvous of two nodes, as one of them sees it, until the other is lost and later."""

    def __init__(self, num_waiting, is_lost):
        self._num_waiting, self._is_lost = num_waiting, is_lost

    def heartbeat(self):
        return View(num_waiting=self._num_waiting, num_present=1 if self._is_lost() else 2)

    def leave(self):
        pass


def sees(node, others):
    """Put others in the place of a node's rendezvous."""
    node._rendezvous.end()
    node._rendezvous = others


def hangs():
    """Work of a rank that waits for its peers, and looks at no signal."""
    time.sleep(60)
    return 0


def trains(run):
    """Work of the first rank after all have met; it looks at no signal either."""
    with exclusive(run, purpose="penstock train"):
        return hangs()


def test_a_pod_that_waits_in_vain_ends_with_the_code_that_is_not_counted(spec, folder, warm, store):
    node = ElasticNode(spec, folder, settings_of(store, gone_code=75), warm)
    assert node.run() == 75


def until_told():
    """Work of a rank that trains until it is asked to stop."""
    signal.sigwait({signal.SIGTERM})
    return EXIT_STOPPED


@contextmanager
def running(spec, folder, port, *, number):
    """Run a node in a process until the block ends, and ask it to leave then."""

    def run():
        settings = settings_of(port, number=number, join_s=600, join_pause_s=0.2)
        code = run_elastic_node(spec, folder, settings, until_told, explain)
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


def test_nodes_that_join_and_go_again_wait_longer_and_longer(folder):
    """On a busy machine a node that waits may miss a round: the first starts alone, and lets it in later."""
    spec = make_spec(nodes=node_range("1:2"), run_dir=str(folder.run), idle_starts=100)

    def of_first(kind):
        return [event for event in folder.events() if (event["event"], event["node"]) == (kind, 0)]

    def has_started(num_nodes, times):
        starts = [event["nodes"] for event in of_first("start") if "nodes" in event]
        return starts.count(2) == times and starts[-1:] == [num_nodes]

    with serving(spec.nodes) as port, running(spec, folder, port, number=0):
        wait_until(lambda: has_started(1, times=0), "a start alone")
        for joins in (1, 2, 3):
            with running(spec, folder, port, number=joins):
                wait_until(lambda joins=joins: has_started(2, times=joins), "a start of two")
            wait_until(lambda joins=joins: has_started(1, times=joins), "a start alone again")
    assert [event["cause"] for event in of_first("delay_joins")] == [
        "2 joins in a row lasted less than 10m00s: the next nodes wait 0.2 s",
        "3 joins in a row lasted less than 10m00s: the next nodes wait 0.4 s",
    ]


def test_a_node_tells_its_supervisor_how_long_its_ranks_ran(folder, monkeypatch):
    told = []

    def advance(state, event, policy):
        told.append(event)
        return supervise.advance(state, event, policy)

    monkeypatch.setattr(elastic_agent, "advance", advance)
    spec = make_spec(nodes=node_range("1:2"), run_dir=str(folder.run))
    with serving(spec.nodes) as port, closing(WarmProcess(a_little_while, explain, folder.log_of)) as warm:
        node = ElasticNode(spec, folder, settings_of(port, join_s=60), warm)
        assert node.run() == 0
    (ended,) = [event for event in told if isinstance(event, supervise.Ended)]
    assert ended.ran_s > LITTLE_S


def a_little_while():
    """Work of a rank that takes some time."""
    time.sleep(LITTLE_S)
    return 0
