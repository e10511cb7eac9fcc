"""One node of an elastic run: torch elastic's rendezvous, driven by the state machine of `supervise.py`.

    next_rendezvous -> start ranks -> watch them, the waiting list and the peers -> stop after saving -> again

Of torch elastic this takes the c10d rendezvous, which numbers the nodes that are there. The rest of its agent
restarts by count, exits with 1 after a clean stop, and starts an interpreter for each rank; here restarts are
bounded by progress, exit codes are kept, and ranks are forked (launch/attempt.py).

The store of the rendezvous lives in a process of its own, so that any node may go. A leaving node takes its
name out of the rendezvous; a killed one is dropped when it has missed its heartbeats.
"""

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any

from torch._C._distributed_c10d import TCPStore  # typed there only
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _Action,
    _RendezvousContext,
    _RendezvousExitOp,
    create_handler,
)

from penstock.core import clock, env
from penstock.core.errors import PenstockError
from penstock.core.signals import signal_name
from penstock.launch.attempt import Explain, WarmProcess, Work, rank_environments
from penstock.launch.job_folder import JobFolder
from penstock.launch.local import EXIT_STOPPED, JobOutcome, die_with
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
)
from penstock.parallel.hosted_store import hosted_store

_KEEP_ALIVE_S, _MISSED = 2, 6
"""Seconds between heartbeats, and how many a lost node misses before the others go on without it."""
_LAST_CALL_S = 3
"""Seconds that enough nodes wait for more."""
_STORE_TIMEOUT_S = 30.0
_JOIN_S = 600
_LOOK_S = 0.1
_LOOK_FOR_MARK_S = 1.0  # in a folder that may be on a network's disk
_LOOK_AT_NODES_S = 0.5
_LIST_S = 5.0
"""Seconds for which a list of checkpoints is good enough while nodes wait."""
_AFTER_LOSS_S = (
    15.0  # of ranks whose peers are gone: they end by themselves, unless they wait for one of those
)
_CODE = "penstock/code"
_NUM_PORTS = 500


class RendezvousGone(PenstockError):
    """The store of the rendezvous does not answer a node that comes."""


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


def start_store(address: str, port: int = 0) -> tuple[BaseProcess, int]:
    """Start the process that holds the rendezvous' store; return it and its port. It ends with this one.

    Args:
        address: of this machine, on which it listens; empty: on all.
        port: 0: any free one.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_hold_store, args=(address, port, sender, os.getpid()))
    process.start()
    sender.close()
    try:
        bound: int = receiver.recv()
    except EOFError:
        raise PenstockError(
            "The store of the rendezvous cannot listen",
            got=f"port {port}",
            fix="Another run may use that port.",
        ) from None
    receiver.close()
    return process, bound


def _hold_store(address: str, port: int, sender: Any, parent: int) -> None:  # Any: a Connection
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    store = hosted_store(address, port, timeout=timedelta(seconds=_STORE_TIMEOUT_S))
    sender.send(store.port)
    while True:
        signal.pause()


class ElasticNode:
    """A node: joins, runs its ranks, and goes on with those that are there, until the run ends or it leaves.

    Args:
        node: number of this node, for logs.
        host: address of the rendezvous' store.
        warm: forks this node's ranks; made before the rendezvous starts its threads.
        join_s: seconds to wait for enough nodes.
        gone_code: exit code of this node once the store is gone, or where too few others came.
        join_pause_s: see `RestartPolicy`.
        address: of this node, by which with its process id the rendezvous tells nodes apart; pods all have
            process id 1. Empty: the address towards the store.

    Raises:
        RendezvousGone: there is no store.
    """

    def __init__(
        self,
        spec: RunSpec,
        folder: JobFolder,
        *,
        node: int,
        host: str,
        port: int,
        warm: WarmProcess,
        join_s: int,
        gone_code: int = 1,
        address: str = "",
        join_pause_s: float = JOIN_PAUSE_S,
    ) -> None:
        env.set_variables({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
        self._spec, self._folder, self._node, self._warm = spec, folder, node, warm
        self._signals = _Signals()
        self._store = _store_at(host, port)
        address = address or _address_towards(host, port)
        self._handler = _handler(spec, self._store, address=address, join_s=join_s)
        self._policy = RestartPolicy(idle_starts=spec.idle_starts, is_elastic=True, join_pause_s=join_pause_s)
        self._state = SupervisorState(newest=folder.newest_step())
        self._num_nodes, self._join_s = 0, join_s
        self._started_at, self._trained_at = 0.0, 0
        self._newest, self._listed_at = -1, -_LIST_S
        self._host, self._port, self._gone_code = host, port, gone_code

    def run(self) -> int:
        """Return the exit code of this node: 0 finished, 75 left after saving, 76 no progress, others."""
        while True:
            try:
                info = self._join()
            except _StopRequested as request:
                decision = self._feed(StopAsked(cause=str(request)))
            except (RendezvousClosedError, RendezvousGracefulExitError):
                return self._code_of_others()
            except RendezvousTimeoutError:  # of this node only: others may train, or wait longer
                self._log("finish", self._no_others(), code=self._gone_code)
                self._handler._stop_heartbeats()
                return self._gone_code
            except DistError as error:  # one was lost while the round began; without a store, the next ends
                self._log("lost", f"no start with those that met: {str(error).splitlines()[0]}")
                continue
            except (RendezvousConnectionError, RendezvousStateError) as error:
                return self._end(self._gone_code, f"the rendezvous is gone: {str(error).splitlines()[0]}")
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
                with self._looking_for_mark():
                    info = self._handler.next_rendezvous()
                self._raise_if_stop_requested()  # while it waited for others
                if self._is_whole(info):
                    return info
                self._log("lost", "no start with those that met: one of them has left since")
        finally:
            self._signals.is_waiting = False

    def _is_whole(self, info: RendezvousInfo) -> bool:
        """False if a node left between the end of a round and the reading of its ranks.

        They are too few then, or are not numbered from 0 on: ranks are given before, and counted after.
        """
        ranks = self._handler._state_holder.state.participants.values()
        return len(ranks) >= self._spec.nodes.least and sorted(ranks) == list(range(info.world_size))

    @contextmanager
    def _looking_for_mark(self) -> Iterator[None]:
        """Context manager: a request to stop in the run's folder wakes this thread as a signal does."""
        ended, waiting = threading.Event(), threading.get_ident()

        def look() -> None:
            while not ended.wait(_LOOK_FOR_MARK_S):
                if self._is_marked():
                    self._signals.name = self._signals.name or BY_REQUEST
                    signal.pthread_kill(waiting, signal.SIGTERM)
                    return

        thread = Thread(target=look, name="request-to-stop", daemon=True)
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
            f"fewer than {self._spec.nodes.least} nodes came within {self._join_s} s, or those that train "
            "did not let this one in"
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
        self._num_nodes = info.world_size
        self._feed(Started(ranks=info.world_size * spec.processes, newest=newest))
        origin = f"checkpoint {newest}" if newest >= 0 else "from the beginning"
        self._log(
            "start",
            f"start {self._state.starts} of this node, {origin}",
            nodes=info.world_size,
            first_rank=self._place_of(info)[0] * spec.processes,
        )
        place, address, port = self._place_of(info)
        environments = rank_environments(
            node=place, num_nodes=info.world_size, processes=spec.processes, address=address, port=port
        )
        self._trained_at = self._folder.trained_at()
        self._warm.start(environments, title=f"{clock.utc_now()} node {self._node}")
        self._started_at = clock.monotonic()
        outcome = self._watch()
        newest = self._folder.newest_step()
        cause = outcome.messages[0] if outcome.messages else ""
        if not self._state.stop_requested_by and self._folder.is_to_stop(env.variable(env.JOB)):
            self._feed(StopAsked(cause=BY_REQUEST))
        ran_s = clock.monotonic() - self._started_at
        return self._feed(Ended(code=outcome.code, newest=newest, cause=cause, ran_s=ran_s))

    def _place_of(self, info: RendezvousInfo) -> tuple[int, str, int]:
        """Return this node's place among the nodes, and where the first rank listens.

        All nodes of a fixed number are there, so a node's place is its number: the engine's order of nodes.
        """
        if self._spec.nodes.is_elastic:
            where = info.bootstrap_store_info
            assert where is not None  # the c10d rendezvous always has it
            return info.rank, where.master_addr, where.master_port
        attempt = self._handler._state_holder.state.round
        return self._node, self._host, self._port + 1 + attempt % _NUM_PORTS

    def _watch(self) -> JobOutcome:
        """Wait for the ranks of an attempt; ask them to stop when this node or the others need it."""
        kill_at, looked_at, is_killed = float("inf"), clock.monotonic(), False
        while (outcome := self._warm.poll()) is None:
            now = clock.monotonic()
            events: list[Event] = []
            if self._signals.name and not self._state.stop_requested_by:
                events.append(StopAsked(cause=self._signals.name))
            if now - looked_at >= _LOOK_AT_NODES_S:
                looked_at = now
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
            clock.sleep(_LOOK_S)
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
            waiting = self._handler.num_nodes_waiting()
            return waiting, len(self._handler._state_holder.state.participants)
        except (RendezvousConnectionError, RendezvousStateError):
            return 0, self._num_nodes  # the ranks may finish without it

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
        self._folder.log_event(event, node=self._node, cause=cause, **values)

    def _pause(self, seconds: float) -> None:
        end = clock.monotonic() + seconds
        while clock.monotonic() < end and not self._asked_to_stop():
            clock.sleep(_LOOK_S)

    def _code_of_others(self) -> int:
        code = int(self._store.get(_CODE)) if self._store.check([_CODE]) else 1
        self._log("finish", "the other nodes have ended the run", code=code)
        return code

    def _end(self, code: int, cause: str) -> int:
        if cause:
            self._log("finish", cause, code=code)
        try:
            is_for_good = self._state.stop_requested_by == BY_REQUEST
            if not is_for_good and (code == EXIT_STOPPED or self._state.stop_requested_by):
                self._leave()
            else:
                self._store.set(_CODE, str(code))
                self._handler.shutdown()
        except (RuntimeError, ValueError, RendezvousError):  # the store is gone: the others see that too
            pass
        self._handler._stop_heartbeats()
        return code

    def _leave(self) -> None:
        """Take this node out of the rendezvous, so that the others need not wait for its heartbeat."""
        self._handler._stop_heartbeats()
        executor = self._handler._op_executor
        executor.run(_LeaveOp(), self._handler._get_deadline(timedelta(seconds=5)))


class _LeaveOp(_RendezvousExitOp):
    """Takes a node out of the rendezvous, also one that waits to be let in.

    Torch's own leaves such a node on the waiting list: the others would stop for a node that is gone.
    """

    def __call__(self, ctx: _RendezvousContext, deadline: float) -> _Action:
        if ctx.node in ctx.state.wait_list and clock.monotonic() <= deadline:
            return _Action.REMOVE_FROM_WAIT_LIST
        if ctx.node in ctx.state.redundancy_list and clock.monotonic() <= deadline:
            return _Action.REMOVE_FROM_REDUNDANCY_LIST
        return super().__call__(ctx, deadline)


def run_elastic_node(
    spec: RunSpec,
    folder: JobFolder,
    *,
    node: int,
    host: str,
    port: int,
    work: Work,
    explain: Explain,
    join_s: int = _JOIN_S,
    logs: Callable[[int], Path] | None = None,
    gone_code: int = 1,
    address: str = "",
    join_pause_s: float = JOIN_PAUSE_S,
) -> int:
    """Run one node of an elastic run; return its exit code.

    Args:
        join_s: seconds to wait for enough nodes.
        logs: rank -> its log file; default: the job folder's.
        gone_code: exit code once the store of the rendezvous is gone, or where too few other nodes came.
        address: of this node, unlike all others'; default: the one towards the store.
        join_pause_s: see `RestartPolicy`.

    Raises:
        RendezvousGone: the store does not answer; `exit_code` is `gone_code`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    warm = WarmProcess(work, explain, logs or folder.log_of)  # before the rendezvous has threads
    try:
        agent = ElasticNode(
            spec,
            folder,
            node=node,
            host=host,
            port=port,
            warm=warm,
            join_s=join_s,
            gone_code=gone_code,
            address=address,
            join_pause_s=join_pause_s,
        )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
        return agent.run()
    except RendezvousGone as error:
        folder.log_event("finish", node=node, cause=str(error), code=gone_code)
        error.exit_code = gone_code
        raise
    except Exception as error:  # its cause must reach the run's folder
        folder.log_event("finish", node=node, cause=f"{type(error).__name__}: {error}", code=1)
        raise
    finally:
        warm.close()


def _store_at(host: str, port: int) -> TCPStore:
    """Return a client of the store.

    Raises:
        RendezvousGone: nothing answers there.
    """
    patience = timedelta(seconds=_STORE_TIMEOUT_S)
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)
    except DistError as error:
        raise RendezvousGone(
            f"The rendezvous at {host}:{port} did not answer within {_STORE_TIMEOUT_S:g} s: "
            + str(error).splitlines()[0],
            fix="The run has ended, or its job waits in the queue again; if it runs, look at the network.",
        ) from None


def _handler(spec: RunSpec, store: TCPStore, *, address: str, join_s: int) -> DynamicRendezvousHandler:
    ident = f"penstock-{spec.name}"
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="",
        run_id=ident,
        min_nodes=spec.nodes.least,
        max_nodes=spec.nodes.most,
        local_addr=address,
        join_timeout=join_s,
        last_call_timeout=_LAST_CALL_S,
        close_timeout=10,
        keep_alive_interval=_KEEP_ALIVE_S,
        keep_alive_max_attempt=_MISSED,
    )
    return create_handler(store, C10dRendezvousBackend(store, ident), parameters)


def _address_towards(host: str, port: int) -> str:
    """Return the address of this machine that others on the way to a host use."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((host, port))
        found: str = asking.getsockname()[0]
        return found
