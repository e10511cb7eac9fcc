"""Supervision of a run: a pure state machine, fed with events, that says what to do next and why.

    STARTING --started--> RUNNING --ended--> STARTING again, after a pause, or ENDED
                          RUNNING --stop asked, peers came or went--> STOPPING --ended--> ...

A supervisor stands above an attempt: all processes of the run that it started, which end together. There is
one for a run of a fixed number of nodes, and one on each node of an elastic run, where nodes come and go.

Restarts are bounded by progress, not by their number: a run that writes a new checkpoint between failures may
fail for ever, and one that fails N times in a row without one ends with EXIT_NO_PROGRESS. The pause before
a restart doubles with each failure in a row. Restarts for nodes that join are bounded likewise: after N in a
row without a new checkpoint, nodes wait until there is one; the run is not ended for what they do. Where
nodes join, reach a checkpoint and are lost again, the pause before the next may join doubles each time. No
clock, files or processes here: times are durations that the caller measures or waits, and checkpoints are
step numbers that it reads.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from penstock.core.units import duration, plural
from penstock.launch.local import EXIT_STOPPED

EXIT_NO_PROGRESS = 76
"""Exit code: the run was started several times in a row without a new checkpoint."""
JOIN_PAUSE_S = 60.0
"""Pause before nodes may join after the second loss in a row of nodes that had joined."""
BY_REQUEST = "request"
"""Sender of a stop that a request to the run asked for: its processes stopped by themselves, and for good."""
EXIT_UNFIT = 77
"""Exit code of a pod whose node lacks something of the run: it failed before its processes were started."""
_FINAL = {
    0: "finished",
    EXIT_NO_PROGRESS: "the nodes made no progress",
    2: "the recipe or the command is wrong: not started again",
}
"""Exit codes that end the run, with their cause where the processes told none."""
FINAL_CODES = tuple(_FINAL)
"""Exit codes of one node that are the run's, whatever the other nodes end with; the first counts most."""
_NO_CHECKPOINT = -1


class Phase(StrEnum):
    """State of the supervisor."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    """Processes were asked to stop after saving."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When an attempt that failed is started again."""

    idle_starts: int = 3
    """Starts in a row without a new checkpoint after which the run ends."""
    pause_s: float = 2.0
    """Pause before the first restart without progress; doubled for each further one."""
    longest_pause_s: float = 60.0
    settled_s: float = 600.0
    """Seconds after which nodes that joined have settled. If any is lost before, the join did not last."""
    join_pause_s: float = JOIN_PAUSE_S
    """Pause before nodes may join after the second join in a row that did not last; doubled for each further
    one. 0: none."""
    longest_join_pause_s: float = 1800.0
    is_elastic: bool = False
    """True: processes that stopped after saving, unasked by this supervisor, did so for a change of nodes."""
    can_requeue: bool = False
    """True: a lost node is replaced by putting the job back into the engine's queue."""

    def pause_after(self, idle: int) -> float:
        """Return the pause in seconds after so many starts in a row without a new checkpoint.

        >>> [RestartPolicy().pause_after(idle) for idle in (0, 1, 2, 3, 40)]
        [0.0, 2.0, 4.0, 8.0, 60.0]
        """
        return min(self.pause_s * 2 ** min(idle - 1, 30), self.longest_pause_s) if idle else 0.0

    def join_pause_after(self, short_joins: int) -> float:
        """Return the pause in seconds before nodes may join, after so many joins in a row that did not last.

        >>> [RestartPolicy().join_pause_after(joins) for joins in (0, 1, 2, 3, 40)]
        [0.0, 0.0, 60.0, 120.0, 1800.0]
        """
        if short_joins < 2:
            return 0.0
        return min(self.join_pause_s * 2.0 ** min(short_joins - 2, 30), self.longest_join_pause_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorState:
    """State of a supervisor: small, and kept across requeues."""

    phase: Phase = Phase.STARTING
    starts: int = 0
    """Attempts so far."""
    idle: int = 0
    """Attempts in a row that ended without a new checkpoint, of those that count."""
    joins: int = 0
    """Restarts in a row for nodes that joined, without a new checkpoint."""
    ranks: int = 0
    """Ranks of the newest attempt; 0: there was none."""
    has_joined: bool = False
    """True if the newest attempt has nodes that joined, and they have not settled."""
    short_joins: int = 0
    """Joins in a row that did not last."""
    newest: int = _NO_CHECKPOINT
    """Step of the newest checkpoint that was seen; -1: none."""
    resize: int = 0
    """Number of nodes that was asked for; 0: no other."""
    stop_requested_by: str = ""
    """Sender of the request to stop; empty: there was none."""
    code: int = 0
    """Exit code, once ENDED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The processes of an attempt are started now."""

    ranks: int
    newest: int
    """Step of the newest checkpoint, from which they go on; -1: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """All processes of an attempt have ended."""

    code: int
    """0 finished, 75 stopped after saving, else failed."""
    newest: int
    """Step of the newest checkpoint now."""
    cause: str = ""
    """Description of the failure."""
    lost_node: bool = False
    """True if a node is gone, with all its processes."""
    ran_s: float = 0.0
    """Seconds from the start of the processes to their end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """This supervisor was asked to stop: by a signal, or a request."""

    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesCame:
    """Nodes wait to join."""

    num_nodes: int
    newest: int = _NO_CHECKPOINT
    """Step of the newest checkpoint now."""
    running_s: float = 0.0
    """Seconds since the processes of this attempt were started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesLost:
    """Nodes of the attempt no longer answer."""

    num_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeAsked:
    """Another fixed number of nodes was asked for."""

    num_nodes: int


Event = Started | Ended | StopAsked | NodesCame | NodesLost | ResizeAsked


class Act(StrEnum):
    """Next action of a supervisor."""

    NOTHING = "nothing"
    START = "start"
    """Start an attempt after `pause_s`."""
    STOP = "stop"
    """Ask the processes to stop after saving."""
    DELAY_JOINS = "delay_joins"
    """Nothing yet: nodes that come have to wait."""
    FINISH = "finish"
    """Exit with `code`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Next action and its reason."""

    act: Act
    cause: str = ""
    pause_s: float = 0.0
    code: int = 0


_NOTHING = Decision(act=Act.NOTHING)


def newest_as_text(step: int) -> str:
    """Return what events say of the newest checkpoint; a damaged one is passed over by the trainer.

    >>> newest_as_text(80), newest_as_text(-1)
    ('newest checkpoint 80', 'no checkpoint yet')
    """
    return f"newest checkpoint {step}" if step >= 0 else "no checkpoint yet"


def advance(state: SupervisorState, event: Event, policy: RestartPolicy) -> tuple[SupervisorState, Decision]:
    """Return the next state and what to do.

    >>> state, _ = advance(SupervisorState(), Started(ranks=2, newest=-1), RestartPolicy())
    >>> state, decision = advance(state, Ended(code=1, newest=40, cause="Rank 1 failed."), RestartPolicy())
    >>> decision.act, decision.pause_s, decision.cause
    (<Act.START: 'start'>, 0.0, 'Rank 1 failed. Checkpoint 40 is new: start again at once')
    """
    if state.phase is Phase.ENDED:
        return state, _NOTHING
    match event:
        case Started():
            return _started(state, event, policy)
        case StopAsked():
            return _stop_asked(state, event)
        case NodesCame():
            return _nodes_came(state, event, policy)
        case NodesLost():
            return _stopped_for(state, f"{plural(event.num_nodes, 'node')} lost: continue without them")
        case ResizeAsked():
            asked = f"resize to {plural(event.num_nodes, 'node')}: save, and continue with them"
            return _stopped_for(replace(state, resize=event.num_nodes), asked)
        case Ended():
            return _ended(state, event, policy)


def _started(
    state: SupervisorState, event: Started, policy: RestartPolicy
) -> tuple[SupervisorState, Decision]:
    """Begin an attempt, unless too many before it ended with nobody there to see their ends.

    Count nodes that joined and are lost again: more ranks than before, and then fewer.
    """
    if state.phase is not Phase.STARTING:
        return state, _NOTHING
    now = replace(state, newest=event.newest, idle=0, joins=0) if event.newest > state.newest else state
    if now.idle >= policy.idle_starts:
        return _no_progress(now, "the last start ended without a word, as when its first node is lost")
    running = replace(now, phase=Phase.RUNNING, starts=now.starts + 1, ranks=event.ranks)
    if not policy.is_elastic or now.ranks in (0, event.ranks):
        return running, _NOTHING
    if event.ranks > now.ranks:
        return replace(running, has_joined=True), _NOTHING
    if not now.has_joined:
        return running, _NOTHING
    short_joins = now.short_joins + 1
    running = replace(running, has_joined=False, short_joins=short_joins)
    if not (pause_s := policy.join_pause_after(short_joins)):
        return running, _NOTHING
    cause = (
        f"{short_joins} joins in a row lasted less than {duration(policy.settled_s)}: the next nodes wait "
        f"{duration(pause_s)}"
    )
    return running, Decision(act=Act.DELAY_JOINS, cause=cause)


def _stopped_for(state: SupervisorState, cause: str) -> tuple[SupervisorState, Decision]:
    """Stop processes that run, to start them again with other nodes."""
    if state.phase is not Phase.RUNNING:
        return state, _NOTHING
    return replace(state, phase=Phase.STOPPING), Decision(act=Act.STOP, cause=cause)


def _nodes_came(
    state: SupervisorState, event: NodesCame, policy: RestartPolicy
) -> tuple[SupervisorState, Decision]:
    """Let nodes join, unless that was done often in vain: they may be what fails."""
    joins = 0 if event.newest > state.newest else state.joins
    if state.phase is not Phase.RUNNING or joins >= policy.idle_starts:
        return state, _NOTHING
    if event.running_s < policy.join_pause_after(state.short_joins):
        return state, _NOTHING
    cause = f"{plural(event.num_nodes, 'node')} waiting to join: save, and continue with them"
    if joins + 1 == policy.idle_starts:
        cause += f"; restart {joins + 1} for joins without a new checkpoint: the next wait for one"
    return _stopped_for(replace(state, joins=joins + 1), cause)


def _stop_asked(state: SupervisorState, event: StopAsked) -> tuple[SupervisorState, Decision]:
    asked = replace(state, stop_requested_by=state.stop_requested_by or event.cause)
    if state.phase is Phase.STARTING:  # nothing runs: there is nothing to wait for
        return _finish(
            asked, EXIT_STOPPED, f"stopped by {asked.stop_requested_by} before the processes were started"
        )
    if state.phase is Phase.STOPPING:
        return asked, _NOTHING
    cause = f"stop requested by {event.cause}: save, and end"
    return replace(asked, phase=Phase.STOPPING), Decision(act=Act.STOP, cause=cause)


def _ended(state: SupervisorState, event: Ended, policy: RestartPolicy) -> tuple[SupervisorState, Decision]:
    if state.phase is Phase.STARTING:
        return state, _NOTHING
    is_new = event.newest > state.newest
    changes_nodes = state.phase is Phase.STOPPING and (policy.is_elastic or state.resize > 0)
    is_settled = state.has_joined and event.ran_s >= policy.settled_s
    now = replace(
        state,
        newest=max(state.newest, event.newest),
        idle=0 if is_new else state.idle,
        joins=0 if is_new else state.joins,
        has_joined=state.has_joined and not is_settled,
        short_joins=0 if is_settled else state.short_joins,
        phase=Phase.STARTING,
        resize=0,
    )
    counted = now if is_new else replace(now, idle=now.idle + 1)
    if event.code in _FINAL:
        return _finish(now, event.code, event.cause.rstrip(".") or _FINAL[event.code])
    at = newest_as_text(now.newest)
    if event.code == EXIT_STOPPED and not state.stop_requested_by:
        if policy.is_elastic or changes_nodes:  # no failure
            return now, Decision(act=Act.START, cause=f"the nodes changed: continue, {at}")
        return _stopped_by_engine(counted, policy, at)
    cause = (event.cause or f"exit code {event.code}").rstrip(".")
    if state.stop_requested_by:
        return _ended_on_request(counted, event, policy, cause, at)
    if changes_nodes:
        return now, Decision(act=Act.START, cause=f"{cause}. The nodes changed: continue, {at}")
    if counted.idle >= policy.idle_starts:
        return _no_progress(counted, cause)
    if event.lost_node and policy.can_requeue:
        return _finish(counted, EXIT_STOPPED, f"{cause}. Back to the queue for another node, {at}")
    pause_s = policy.pause_after(counted.idle)
    how = f"Checkpoint {now.newest} is new: start again at once"
    if not is_new:
        how = f"{counted.idle} of at most {policy.idle_starts} starts without a new checkpoint: "
        how += f"again in {pause_s:g} s"
    return counted, Decision(act=Act.START, cause=f"{cause}. {how}", pause_s=pause_s)


def _stopped_by_engine(
    state: SupervisorState, policy: RestartPolicy, at: str
) -> tuple[SupervisorState, Decision]:
    if state.idle >= policy.idle_starts:
        return _no_progress(state, "the processes were stopped by the engine")
    return _finish(state, EXIT_STOPPED, f"the processes were stopped by the engine, {at}")


def _ended_on_request(
    state: SupervisorState, event: Ended, policy: RestartPolicy, cause: str, at: str
) -> tuple[SupervisorState, Decision]:
    """Finish after a request to stop; it kills processes that cannot handle it yet, which is no failure.

    A stop that puts the job back into the queue is bounded as failures are: its time limit may be shorter
    than a start.
    """
    said, code = f"stopped by {state.stop_requested_by}, {at}", EXIT_STOPPED
    if event.code != EXIT_STOPPED:
        said = f"{cause}, while stopping for {state.stop_requested_by}; {at}"
        code = EXIT_STOPPED if event.lost_node and policy.can_requeue else event.code
    comes_back = code == EXIT_STOPPED and policy.can_requeue and state.stop_requested_by != BY_REQUEST
    if comes_back and state.idle >= policy.idle_starts:
        return _no_progress(state, said)
    return _finish(state, code, said)


def _no_progress(state: SupervisorState, cause: str) -> tuple[SupervisorState, Decision]:
    times = f"{plural(state.idle, 'start')} in a row without a new checkpoint"
    return _finish(state, EXIT_NO_PROGRESS, f"{cause}. {times}: given up")


def _finish(state: SupervisorState, code: int, cause: str) -> tuple[SupervisorState, Decision]:
    ended = replace(state, phase=Phase.ENDED, code=code)
    return ended, Decision(act=Act.FINISH, cause=cause, code=code)
