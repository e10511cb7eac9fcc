"""Next action of the operator for a run, as a pure function of the state of the cluster.

    no job             -> APPLY its objects
    another job wanted -> STOP it (its pods save a checkpoint), wait until the pods are gone, then APPLY
    an unfit node      -> EXCLUDE it, which wants another job
    a failed preflight -> EXCLUDE the nodes that it names
    pod 0 has no node  -> EVICT another pod, whose node it takes
    deleted            -> STOP, wait, RELEASE the object

Nothing is remembered from one reconciliation to the next. So an operator that is killed at any point is
followed by one that sees the same and does the rest. Growing and shrinking within MIN:MAX needs no act here:
a pod that waits for a node is how the scheduler is asked for capacity, and the pods that are there train
(launch/pods/node.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.core.units import plural

EXCLUDE_AT_MOST = 3
"""Nodes that the operator excludes of its own accord; a fault of all of them is not theirs."""
FIT_S = 20
"""Seconds of a pod's processes after which its preflight is over: it ends within a few, and with them."""
STUCK_S = 30.0
"""Seconds that the first pod may wait for a node while others have one."""


class RunPhase(StrEnum):
    """Phase of a run, as `kubectl get` shows it."""

    PENDING = "Pending"
    RUNNING = "Running"
    STOPPING = "Stopping"
    """Pods save a checkpoint and end."""
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    INVALID = "Invalid"
    """The specification cannot run; `message` says why."""


class RunAction(StrEnum):
    """Next action of the operator."""

    NOTHING = "Nothing"
    APPLY = "Starting"
    STOP = "Stopping"
    EXCLUDE = "NodeExcluded"
    EVICT = "PodMoved"
    RELEASE = "Released"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSeen:
    """A pod of the run."""

    name: str
    index: int
    """Number of its node in the run."""
    node: str = ""
    """Node of the cluster; empty: it has none yet."""
    phase: str = "Pending"
    is_leaving: bool = False
    waited_s: float = 0.0
    """Seconds since it was created."""
    running_s: float = 0.0
    """Seconds since its processes started; 0: they have not."""
    unfit: str = ""
    """What its checks found wrong with the node; empty: nothing."""
    slow_nodes: Mapping[str, str] = field(default_factory=dict)
    """Nodes to leave out, of all that this pod's preflight measured, each with its reason."""

    @property
    def is_live(self) -> bool:
        """True if it has processes, or will have."""
        return self.phase in ("Pending", "Running")

    @property
    def trains(self) -> bool:
        """True if its processes run, and were not asked to stop."""
        return self.phase == "Running" and not self.is_leaving


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSeen:
    """The JobSet or TrainJob of the run."""

    digest: str
    """Digest of the objects that it was made with."""
    nodes: str = ""
    """Nodes that it was made for."""
    is_leaving: bool = False
    end: str = ""
    """COMPLETED, FAILED, or empty: it has not ended."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeen:
    """A run, as the cluster shows it."""

    digest: str = ""
    """Digest of the wanted objects; empty: none can be made."""
    nodes: str = ""
    """Nodes that are wanted, as 4 or 2:4."""
    least: int = 1
    invalid: str = ""
    """Why no objects can be made of the specification."""
    is_suspended: bool = False
    is_deleted: bool = False
    excluded: tuple[str, ...] = ()
    """Nodes that the operator excluded."""
    job: JobSeen | None = None
    pods: Sequence[PodSeen] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDecision:
    """Next action, and what is shown of the run meanwhile."""

    act: RunAction = RunAction.NOTHING
    phase: RunPhase
    cause: str = ""
    targets: tuple[str, ...] = ()
    """Nodes to exclude, or the pod to evict."""


def decide(seen: RunSeen) -> RunDecision:
    """Return what to do next.

    >>> decide(RunSeen(digest="a", nodes="2")).act
    <RunAction.APPLY: 'Starting'>
    >>> running = JobSeen(digest="a", nodes="2")
    >>> decide(RunSeen(digest="b", nodes="3", job=running)).cause
    'from 2 to 3 nodes: save, and continue with them'
    """
    if seen.is_deleted:
        return _gone(
            seen, "deleted: save, and end", RunDecision(act=RunAction.RELEASE, phase=RunPhase.STOPPING)
        )
    if seen.is_suspended:
        stopped = RunDecision(phase=RunPhase.SUSPENDED, cause=seen.invalid)
        return _gone(seen, "suspended: save, and end", stopped)
    if seen.invalid:
        phase = RunPhase.INVALID if seen.job is None else _phase_of(seen)
        kept = "" if seen.job is None else "The run continues unchanged. "
        return RunDecision(phase=phase, cause=f"{kept}{seen.invalid}")
    job = seen.job
    if job is None or job.is_leaving:
        start = RunDecision(act=RunAction.APPLY, phase=RunPhase.PENDING, cause=f"on {_nodes(seen.nodes)}")
        return _gone(seen, "", start)
    if job.digest != seen.digest:
        return RunDecision(act=RunAction.STOP, phase=RunPhase.STOPPING, cause=_change(seen, job))
    if job.end == "COMPLETED":
        return RunDecision(phase=RunPhase.SUCCEEDED, cause=job.reason)
    if job.end:
        return _slow_nodes(seen) or RunDecision(phase=RunPhase.FAILED, cause=job.reason)
    return _unfit_node(seen) or _stuck(seen) or RunDecision(phase=_phase_of(seen), cause=job.reason)


def _gone(seen: RunSeen, cause: str, then: RunDecision) -> RunDecision:
    """Stop the job, wait until all pods are gone, and then act."""
    if seen.job is not None and not seen.job.is_leaving:
        return RunDecision(act=RunAction.STOP, phase=RunPhase.STOPPING, cause=cause)
    if seen.job is not None or seen.pods:
        return RunDecision(
            phase=RunPhase.STOPPING, cause=f"{plural(len(seen.pods), 'pod')} of before still there"
        )
    return then


def _change(seen: RunSeen, job: JobSeen) -> str:
    if job.end:
        return "the specification changed after the end: start again"
    if job.nodes != seen.nodes:
        return f"from {job.nodes} to {seen.nodes} nodes: save, and continue with them"
    return "the specification or its nodes changed: save, and continue"


def _phase_of(seen: RunSeen) -> RunPhase:
    return RunPhase.RUNNING if any(pod.trains for pod in seen.pods) else RunPhase.PENDING


def _unfit_node(seen: RunSeen) -> RunDecision | None:
    """Exclude a node whose preflight failed, if it passed elsewhere: else the fault is not the node's."""
    fit = {pod.node for pod in seen.pods if pod.trains and pod.running_s >= FIT_S}
    known = {pod.node for pod in seen.pods if pod.trains}.union(
        seen.excluded
    )  # a pod that ended stays listed
    bad = {pod.node: pod.unfit for pod in seen.pods if pod.unfit and pod.node not in known}
    if not bad or not fit:
        return None
    node, why = min(bad.items())
    if len(seen.excluded) >= EXCLUDE_AT_MOST:
        said = f"{plural(len(seen.excluded), 'node')} are excluded already, and {node} fails, too: {why}"
        return RunDecision(phase=_phase_of(seen), cause=said)
    return RunDecision(
        act=RunAction.EXCLUDE, phase=_phase_of(seen), cause=f"node {node}: {why}", targets=(node,)
    )


def _slow_nodes(seen: RunSeen) -> RunDecision | None:
    """Exclude the nodes that a failed preflight names, which ended the job."""
    named_by_all = {node: why for pod in seen.pods for node, why in pod.slow_nodes.items()}
    slow = sorted(set(named_by_all).difference(seen.excluded))
    if not slow:
        return None
    each = ", ".join(f"{node} ({named_by_all[node] or 'see the report'})" for node in slow)
    named = f"the preflight found {plural(len(slow), 'node')} to leave out: {each}"
    if len(seen.excluded) + len(slow) > EXCLUDE_AT_MOST:
        least = f"at most {EXCLUDE_AT_MOST} are excluded by the operator, {len(seen.excluded)} are"
        return RunDecision(phase=RunPhase.FAILED, cause=f"{named}; {least}: see the report")
    return RunDecision(act=RunAction.EXCLUDE, phase=RunPhase.PENDING, cause=named, targets=tuple(slow))


def _stuck(seen: RunSeen) -> RunDecision | None:
    """Give the first pod, which holds the rendezvous, the node of another one."""
    first = [pod for pod in seen.pods if pod.index == 0 and pod.is_live and not pod.is_leaving]
    others = [pod for pod in seen.pods if pod.index and pod.trains]
    leaving = any(pod.is_leaving for pod in seen.pods if pod.index)
    if not first or first[0].node or first[0].waited_s < STUCK_S or leaving or len(others) < seen.least:
        return None
    last = max(others, key=lambda pod: pod.index)
    cause = f"pod 0 has no node: it takes {last.node} of pod {last.index}"
    return RunDecision(act=RunAction.EVICT, phase=RunPhase.PENDING, cause=cause, targets=(last.name,))


def _nodes(nodes: str) -> str:
    return f"{nodes} node" if nodes == "1" else f"{nodes} nodes"
