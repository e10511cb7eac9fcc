"""One node of an elastic run: its rendezvous, driven by the state machine of `supervise.py`.

    join -> start ranks -> watch them, the waiting list and the peers -> stop after saving -> join again

Restarts are bounded by progress, exit codes are kept, and ranks are forked (launch/nodes/attempt.py).

The rendezvous is answered by a process of its own (rendezvous/server.py), so that any node may go. A leaving
node takes its name out; a killed one is dropped when it has given no sign of life for a while.
"""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from types import FrameType

from penstock.core import clock, env
from penstock.core.signals import signal_name
from penstock.launch.job_folder import JobFolder
from penstock.launch.local import EXIT_STOPPED, JobOutcome
from penstock.launch.nodes.attempt import Explain, WarmProcess, Work, rank_environments
from penstock.launch.rendezvous.client import (
    JoinTimeout,
    Rendezvous,
    RendezvousClosed,
    RendezvousGone,
    RoundBroken,
)
from penstock.launch.rendezvous.membership import RendezvousInfo
from penstock.launch.spec import RunSpec
from penstock.launch.supervise import (
    BY_REQUEST,
    JOIN_PAUSE_S,
    Act,
    Decision,
    Ended,
    Event,
    NodesCame,
    NodesLost,
    RestartPolicy,
    Started,
    StopAsked,
    SupervisorState,
    advance,
    newest_as_text,
)

_POLL_S = 0.1
_POLL_MARK_S = 1.0  # in a folder that may be on a network's disk
_POLL_NODES_S = 0.5
_LIST_S = 5.0
"""Seconds for which a list of checkpoints is good enough while nodes wait."""
_AFTER_LOSS_S = (
    15.0  # of ranks whose peers are gone: they end by themselves, unless they wait for one of those
)


class _StopRequested(Exception):
    """A signal or a request arrived while the node waited for others; its text is the sender."""


class _Signals:
    """SIGTERM and SIGINT as a flag, or as an exception while nothing else would look at the flag."""

    def __init__(self) -> None:
        self.name = ""
        self.is_waiting = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.name = self.name or signal_name(number)
        if self.is_waiting:
            self.is_waiting = False
            raise _StopRequested(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Settings of one node of an elastic run: its rendezvous, and how long it waits there."""

    node: int
    """Number of the node; members of a round are in this order."""
    host: str
    """Address of the rendezvous."""
    port: int
    key: str = field(repr=False)
    """Key of the rendezvous."""
    address: str = ""
    """Address of this node, unlike all others', at which the first rank listens. Empty: the one towards the
    rendezvous."""
    join_s: int = 600
    """Seconds to wait for enough nodes."""
    join_pause_s: float = JOIN_PAUSE_S
    """See `RestartPolicy`."""
    gone_code: int = 1
    """Exit code once the rendezvous is gone, or where too few other nodes came."""


class ElasticNode:
    """A node: joins, runs its ranks, and goes on with those that are there, until the run ends or it leaves.

    Args:
        warm: forks this node's ranks; made before the rendezvous starts its thread.

    Raises:
        RendezvousGone: there is no rendezvous.
    """

    def __init__(self, spec: RunSpec, folder: JobFolder, settings: NodeSettings, warm: WarmProcess) -> None:
        self._spec, self._folder, self._settings, self._warm = spec, folder, settings, warm
        self._signals = _Signals()
        host, port = settings.host, settings.port
        address = settings.address or _address_towards(host, port)
        self._rendezvous = Rendezvous(host, port, key=settings.key, number=settings.node, address=address)
        self._policy = RestartPolicy(
            idle_starts=spec.idle_starts, is_elastic=True, join_pause_s=settings.join_pause_s
        )
        self._state = SupervisorState(newest=folder.newest_step())
        self._num_nodes = 0
        self._started_at, self._trained_at = 0.0, 0
        self._newest, self._listed_at = -1, -_LIST_S

    def run(self) -> int:
        """Return the exit code of this node: 0 finished, 75 left after saving, 76 no progress, others."""
        try:
            return self._run()
        finally:
            self._rendezvous.end()

    def _run(self) -> int:
        while True:
            try:
                info = self._join()
            except _StopRequested as request:
                decision = self._feed(StopAsked(cause=str(request)))
            except RendezvousClosed as closed:
                self._log("finish", "the other nodes have ended the run", code=closed.code)
                return closed.code
            except JoinTimeout:  # of this node only: others may train, or wait longer
                self._log("finish", self._no_others(), code=self._settings.gone_code)
                return self._settings.gone_code
            except RendezvousGone as error:
                cause = f"the rendezvous is gone: {str(error).splitlines()[0]}"
                return self._end(self._settings.gone_code, cause)
            else:
                decision = self._attempt(info)
            if decision.act is Act.FINISH:
                return self._end(decision.code, "")
            if decision.pause_s:
                self._pause(decision.pause_s)

    def _join(self) -> RendezvousInfo:
        self._signals.is_waiting = True
        try:
            while True:
                self._raise_if_stop_requested()
                try:
                    with self._watching_mark():
                        info = self._rendezvous.join(self._settings.join_s)
                except RoundBroken as broken:
                    self._log("lost", str(broken))
                    continue
                self._raise_if_stop_requested()  # while it waited for others
                return info
        finally:
            self._signals.is_waiting = False

    @contextmanager
    def _watching_mark(self) -> Iterator[None]:
        """Context manager: a request to stop in the run's folder wakes this thread as a signal does."""
        ended, waiting = threading.Event(), threading.get_ident()

        def watch() -> None:
            while not ended.wait(_POLL_MARK_S):
                if self._is_marked():
                    self._signals.name = self._signals.name or BY_REQUEST
                    signal.pthread_kill(waiting, signal.SIGTERM)
                    return

        thread = Thread(target=watch, name="request-to-stop", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _raise_if_stop_requested(self) -> None:
        if sender := self._asked_to_stop():
            raise _StopRequested(sender)

    def _no_others(self) -> str:
        return (
            f"fewer than {self._spec.nodes.least} nodes came within {self._settings.join_s} s, or those that "
            "train did not let this one in"
        )

    def _asked_to_stop(self) -> str:
        """Return who asked to stop; empty: nobody. Ranks that train see a request by themselves."""
        if self._signals.name:
            return self._signals.name
        return BY_REQUEST if self._is_marked() else ""

    def _is_marked(self) -> bool:
        return self._folder.is_to_stop(env.variable(env.JOB)) and not self._folder.is_trained()

    def _attempt(self, info: RendezvousInfo) -> Decision:
        spec, newest = self._spec, self._folder.newest_step()
        self._num_nodes = info.num_nodes
        self._feed(Started(ranks=info.num_nodes * spec.processes, newest=newest))
        self._log(
            "start",
            f"start {self._state.starts} of this node, {newest_as_text(newest)}",
            nodes=info.num_nodes,
            first_rank=info.index * spec.processes,
        )
        environments = rank_environments(
            node=info.index,
            num_nodes=info.num_nodes,
            processes=spec.processes,
            address=info.address,
            port=info.port,
        )
        self._trained_at = self._folder.trained_at()
        self._warm.start(environments, title=f"{clock.utc_now()} node {self._settings.node}")
        self._started_at = clock.monotonic()
        outcome = self._watch()
        newest = self._folder.newest_step()
        cause = outcome.messages[0] if outcome.messages else ""
        if not self._state.stop_requested_by and self._folder.is_to_stop(env.variable(env.JOB)):
            self._feed(StopAsked(cause=BY_REQUEST))
        ran_s = clock.monotonic() - self._started_at
        return self._feed(Ended(code=outcome.code, newest=newest, cause=cause, ran_s=ran_s))

    def _watch(self) -> JobOutcome:
        """Wait for the ranks of an attempt; ask them to stop when this node or the others need it."""
        kill_at, polled_at, is_killed = float("inf"), clock.monotonic(), False
        while (outcome := self._warm.poll()) is None:
            now = clock.monotonic()
            events: list[Event] = []
            if self._signals.name and not self._state.stop_requested_by:
                events.append(StopAsked(cause=self._signals.name))
            if now - polled_at >= _POLL_NODES_S:
                polled_at = now
                if not self._state.stop_requested_by and (sender := self._asked_to_stop()):
                    events.append(StopAsked(cause=sender))
                waiting, present = self._nodes()
                events += self._news_of_nodes(waiting, present)
                if present < self._num_nodes:
                    kill_at = min(kill_at, now + self._patience_s())
            for event in events:
                if self._feed(event).act is Act.STOP:
                    self._warm.stop()
                    kill_at = min(kill_at, now + self._spec.grace_s)
            if now >= kill_at and not is_killed:
                why = "did not stop in time" if self._have_met() else "wait for others that are gone"
                self._log("kill", f"the processes {why}")
                self._warm.kill()
                is_killed = True
            clock.sleep(_POLL_S)
        if is_killed and outcome.lost and not self._have_met():  # no failure, and nothing is lost
            return JobOutcome(EXIT_STOPPED, [], stop_requested=outcome.stop_requested)
        return outcome

    def _have_met(self) -> bool:
        """True if the ranks of this attempt have met: the first has locked the run's folder.

        A network disk may show that late. Nothing is lost so: ranks of a node that left have ended once a
        checkpoint was whole, and without those of a lost node none is written.
        """
        return self._folder.trained_at() != self._trained_at

    def _patience_s(self) -> float:
        """Return how long ranks may still run after another node's have ended or are lost."""
        if not self._have_met():
            return 0.0
        return self._spec.grace_s if self._state.stop_requested_by else _AFTER_LOSS_S

    def _nodes(self) -> tuple[int, int]:
        """Return how many nodes wait to join, and how many of this attempt have not ended or been lost."""
        try:
            view = self._rendezvous.heartbeat()
        except RendezvousGone:
            return 0, self._num_nodes  # the ranks may finish without it
        return view.num_waiting, view.num_present

    def _news_of_nodes(self, waiting: int, present: int) -> list[Event]:
        events: list[Event] = []
        if waiting:
            running_s = clock.monotonic() - self._started_at
            events.append(NodesCame(num_nodes=waiting, newest=self._newest_step(), running_s=running_s))
        if present < self._num_nodes:  # second: it may have ended for those that came, and waits with them
            events.append(NodesLost(num_nodes=self._num_nodes - present))
        return events

    def _newest_step(self) -> int:
        """Return the newest checkpoint of some seconds ago: nodes may wait long, and buckets are slow."""
        now = clock.monotonic()
        if now - self._listed_at >= _LIST_S:
            self._newest, self._listed_at = self._folder.newest_step(), now
        return self._newest

    def _feed(self, event: Event) -> Decision:
        self._state, decision = advance(self._state, event, self._policy)
        if decision.act is not Act.NOTHING:
            self._log(decision.act.value, decision.cause)
        return decision

    def _log(self, event: str, cause: str, **values: int) -> None:
        self._folder.log_event(event, node=self._settings.node, cause=cause, **values)

    def _pause(self, seconds: float) -> None:
        end = clock.monotonic() + seconds
        while clock.monotonic() < end and not self._asked_to_stop():
            clock.sleep(_POLL_S)

    def _end(self, code: int, cause: str) -> int:
        if cause:
            self._log("finish", cause, code=code)
        with suppress(RendezvousGone):  # the others see that, too
            is_for_good = self._state.stop_requested_by == BY_REQUEST
            if not is_for_good and (code == EXIT_STOPPED or self._state.stop_requested_by):
                self._rendezvous.leave()
            else:
                self._rendezvous.close(code)
        return code


def run_elastic_node(
    spec: RunSpec,
    folder: JobFolder,
    settings: NodeSettings,
    work: Work,
    explain: Explain,
    *,
    logs: Callable[[int], Path] | None = None,
) -> int:
    """Run one node of an elastic run; return its exit code.

    Args:
        logs: rank -> its log file; default: the job folder's.

    Raises:
        RendezvousGone: it does not answer; `exit_code` is `settings.gone_code`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    warm = WarmProcess(work, explain, logs or folder.log_of)  # before the rendezvous has a thread
    try:
        agent = ElasticNode(spec, folder, settings, warm)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
        return agent.run()
    except RendezvousGone as error:
        folder.log_event("finish", node=settings.node, cause=str(error), code=settings.gone_code)
        error.exit_code = settings.gone_code
        raise
    except Exception as error:  # its cause must reach the run's folder
        folder.log_event("finish", node=settings.node, cause=f"{type(error).__name__}: {error}", code=1)
        raise
    finally:
        warm.close()


def _address_towards(host: str, port: int) -> str:
    """Return the address of this machine that others on the way to a host use."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((host, port))
        found: str = asking.getsockname()[0]
        return found
