"""Supervise a run to its end: start attempts, hand on requests, log every transition with its cause.

`supervise_gang` is for a fixed number of nodes: one supervisor above all of them. An elastic run has one on
each node (launch/nodes/elastic_agent.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from penstock.core import clock
from penstock.core.signals import StopFlag
from penstock.launch.job_folder import JobFolder
from penstock.launch.spec import NodeRange, RunSpec
from penstock.launch.supervise import (
    BY_REQUEST,
    Act,
    Decision,
    Ended,
    Event,
    ResizeAsked,
    RestartPolicy,
    Started,
    StopAsked,
    SupervisorState,
    advance,
    newest_as_text,
)

_POLL_S = 0.2


class Gang(Protocol):
    """All processes of an attempt, on all nodes: they start, stop and end together."""

    def start(self, spec: RunSpec, attempt: int) -> None:
        """Start them; `attempt` counts from 0."""

    def poll(self) -> Ended | None:
        """Return how they ended, once all have; the newest checkpoint is filled in by the supervisor."""

    def stop(self) -> None:
        """Ask them to stop after saving."""

    def kill(self) -> None:
        """Kill them."""


def supervise_gang(
    spec: RunSpec,
    folder: JobFolder,
    gang: Gang,
    flag: StopFlag,
    *,
    can_requeue: bool,
    on_event: Callable[[str], None] = lambda _: None,
) -> int:
    """Run attempts until the run ends; return its exit code.

    Args:
        flag: set by a signal: stop after saving.
        can_requeue: the engine can put the job back into its queue.
        on_event: gets a sentence for each transition, for a terminal.
    """
    policy = RestartPolicy(idle_starts=spec.idle_starts, can_requeue=can_requeue)
    run = _WatchedRun(spec, folder, policy, flag, on_event, folder.supervisor())
    while True:
        if (sender := run.asked_to_stop()) and run.feed(StopAsked(cause=sender)).act is Act.FINISH:
            return run.state.code
        if run.begin().act is Act.FINISH:
            return run.state.code
        # Counted before it ends: a supervisor that is lost with its node cannot count it then.
        folder.write_supervisor(replace(run.state, idle=run.state.idle + 1))
        gang.start(run.spec, run.state.starts - 1)
        decision = run.until_end(gang)
        folder.write_supervisor(run.state)
        if decision.act is Act.FINISH:
            return decision.code
        run.pause(decision.pause_s)


@dataclass(slots=True)
class _WatchedRun:
    """A run that is supervised: its state, what was asked of it, and its transitions in the log."""

    spec: RunSpec
    folder: JobFolder
    policy: RestartPolicy
    flag: StopFlag
    on_event: Callable[[str], None]
    state: SupervisorState

    def asked_to_stop(self) -> str:
        """Return who asked to stop; empty: nobody. Ranks that train see a request by themselves.

        `penstock launch cancel` does both: it writes the request, and sends the signal.
        """
        if self.flag.requested_by:
            return BY_REQUEST if self.folder.is_to_stop() else self.flag.requested_by
        return BY_REQUEST if self.folder.is_to_stop() and not self.folder.is_trained() else ""

    def feed(self, event: Event) -> Decision:
        self.state, decision = advance(self.state, event, self.policy)
        if decision.act is not Act.NOTHING:
            extra = {"code": decision.code} if decision.act is Act.FINISH else {}
            self.folder.log_event(decision.act.value, cause=decision.cause, **extra)
            self.on_event(decision.cause)
        return decision

    def begin(self) -> Decision:
        if nodes := self.folder.take_request() or self.state.resize:
            self.spec = self.spec.resized(NodeRange(least=nodes, most=nodes))
            self.state = replace(self.state, resize=0)
        newest = self.folder.newest_step()
        decision = self.feed(Started(ranks=self.spec.most_ranks, newest=newest))
        if decision.act is Act.FINISH:
            return decision
        nodes, ranks = self.spec.nodes.most, self.spec.most_ranks
        cause = f"start {self.state.starts}, {newest_as_text(newest)}"
        self.folder.log_event("start", cause=cause, nodes=nodes, ranks=ranks)
        return decision

    def until_end(self, gang: Gang) -> Decision:
        kill_at = float("inf")
        while (ended := gang.poll()) is None:
            now = clock.monotonic()
            if not self.state.stop_requested_by and (sender := self.asked_to_stop()):
                stops = self.feed(StopAsked(cause=sender)).act is Act.STOP
            else:
                nodes = self.folder.take_request()
                stops = bool(nodes) and self.feed(ResizeAsked(num_nodes=nodes)).act is Act.STOP
                if nodes:
                    self.spec = self.spec.resized(NodeRange(least=nodes, most=nodes))
            if stops:
                gang.stop()
                kill_at = now + self.spec.grace_s
            if now > kill_at:
                self.folder.log_event("kill", cause=f"not stopped within {self.spec.grace_s:g} s")
                gang.kill()
                kill_at = float("inf")
            clock.sleep(_POLL_S)
        if not self.state.stop_requested_by and self.folder.is_to_stop():
            self.feed(StopAsked(cause=BY_REQUEST))
        return self.feed(replace(ended, newest=self.folder.newest_step()))

    def pause(self, seconds: float) -> None:
        end = clock.monotonic() + seconds
        while clock.monotonic() < end and not self.asked_to_stop():
            clock.sleep(_POLL_S)
