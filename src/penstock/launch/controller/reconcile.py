"""Reconciliation of a TrainingRun: read the cluster, decide, act, and show it in `.status` and as events.

What must survive a kill of the operator is in objects: the digest of what was asked for and the number of the
start in annotations of the job, excluded nodes in the status of the run. Events have names made of what they
say, so that an operator that does its work again says nothing twice.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from penstock.core import clock
from penstock.core.errors import PenstockError, UsageError
from penstock.core.log import EventLog
from penstock.launch.controller.decide import (
    JobSeen,
    PodSeen,
    RunAction,
    RunDecision,
    RunPhase,
    RunSeen,
    decide,
)
from penstock.launch.controller.ownership import JobFound, clash_of, is_owned, job_of
from penstock.launch.controller.progress import ask_pods
from penstock.launch.engines.kubernetes import check_cluster
from penstock.launch.engines.kubernetes_api import ClusterConnection, UnknownKind
from penstock.launch.engines.kubernetes_state import JOB_KINDS, index_of, state_of
from penstock.launch.pods.preflight import SLOW_NODE
from penstock.launch.render.jobset import has_key, key_secret
from penstock.launch.render.kubernetes import POLICY, POLICY_API, render_kubernetes
from penstock.launch.render.pod_template import labels_of
from penstock.launch.rendezvous.signed import new_key
from penstock.launch.spec import RunSpec
from penstock.launch.supervise import EXIT_UNFIT

Object = dict[str, Any]  # Any: JSON
GROUP, KIND = "penstock.dev", "TrainingRun"
API = f"{GROUP}/v1alpha1"
_DIGEST, _NODES, _START = f"{GROUP}/digest", f"{GROUP}/nodes", f"{GROUP}/start"
_MAX_CHARACTERS = 500
_COMPLAINT = "penstock: "
"""Beginning of the paragraph, of several lines, with which a pod ends."""
_log = EventLog("penstock.operator")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Specification of the run that a TrainingRun describes."""

    spec: RunSpec
    metrics_port: int
    """Port at which the first rank tells its progress."""


Planner = Callable[[Mapping[str, Any], Sequence[str]], RunPlan]
"""Makes a plan of a TrainingRun and the nodes that are excluded; raises PenstockError."""


@dataclass(frozen=True, slots=True)
class Reconciler:
    """Brings the cluster in line with a TrainingRun."""

    cluster: ClusterConnection
    plan: Planner

    def reconcile(self, name: str) -> bool:
        """Bring the cluster one step closer to a run; return False if the run is deleted and nothing is left.

        Raises:
            PenstockError: the API server refused or cannot be reached; try again.
        """
        run = self.cluster.get(API, KIND, name)
        if run is None:
            return False
        found = self._job(run)
        job, pods = found.job, [] if found.clash else list(self.cluster.all("v1", "Pod", labels_of(name)))
        plan, invalid = planned(run, self.plan)
        seen = _seen(run, plan, found.clash or invalid, found, pods)
        decision = decide(seen)
        start = int((run.get("status") or {}).get("starts") or 0)
        if job is not None:
            start = max(start, int((job["metadata"].get("annotations") or {}).get(_START, 0)))
        self._tell(run, decision, seen, start)  # first: what is not done yet is done and told again
        if decision.act is RunAction.RELEASE:
            return False
        changes: Object = {"starts": start}
        if decision.act is RunAction.EXCLUDE:
            changes["excludedNodes"] = sorted({*seen.excluded, *decision.targets})
        elif decision.act is RunAction.STOP and job is not None:
            self.cluster.delete(job["apiVersion"], job["kind"], name)
        elif decision.act is RunAction.EVICT:
            for pod in decision.targets:
                self.cluster.delete("v1", "Pod", pod)
        elif decision.act is RunAction.APPLY and plan is not None:
            decision = self._apply(run, plan.spec, decision, start + 1)
        elif decision.phase is RunPhase.SUSPENDED:
            changes["excludedNodes"] = []
        self._show(run, decision, seen, changes | self._progress(pods, plan.metrics_port if plan else 0))
        return True

    def _apply(self, run: Mapping[str, Any], spec: RunSpec, decision: RunDecision, start: int) -> RunDecision:
        """Apply the objects, the job last; return the decision, or what was refused."""
        *others, job = _objects(run, spec)
        marks = {_DIGEST: digest_of(run), _NODES: str(spec.nodes), _START: str(start)}
        job["metadata"]["annotations"] = {**job["metadata"].get("annotations", {}), **marks}
        try:
            check_cluster(spec, self.cluster)
            for wanted in (*others, job):
                self._check_free(run, wanted)
            self._make_key(run, spec)
            for wanted in (*others, job):
                self.cluster.apply(wanted)
            if not any(wanted["kind"] == POLICY for wanted in others):
                self._delete_policy(run)
        except PenstockError as error:
            refused = RunDecision(phase=RunPhase.PENDING, cause=str(error))
            self._event(run, "Refused", refused.cause, start, is_warning=True)
            return refused
        return decision

    def _make_key(self, run: Mapping[str, Any], spec: RunSpec) -> None:
        """Make the key of the run's rendezvous; that of an earlier start stays.

        The operator may not read Secrets, so the run's status says that the key is its own: before the key is
        made, as the operator may die in between.

        Raises:
            UsageError: the Secret is there, and this run did not make it: its maker knows the key.
        """
        if not has_key(spec):
            return
        name, is_made = run["metadata"]["name"], bool((run.get("status") or {}).get("hasKey"))
        secret = key_secret(spec, self.cluster.namespace, new_key())
        secret["metadata"]["ownerReferences"] = [_owner(run)]
        if not is_made:
            self.cluster.set_status(API, KIND, name, {"hasKey": True})
        if not self.cluster.create(secret) and not is_made:
            self.cluster.set_status(API, KIND, name, {"hasKey": None})
            raise UsageError(clash_of(secret))

    def _delete_policy(self, run: Mapping[str, Any]) -> None:
        """Delete the NetworkPolicy of an earlier start: the run owns it, so no collector comes for it."""
        name = run["metadata"]["name"]
        before = self.cluster.get(POLICY_API, POLICY, name)
        if before is not None and is_owned(before, run["metadata"]["uid"]):
            self.cluster.delete(POLICY_API, POLICY, name)

    def _check_free(self, run: Mapping[str, Any], wanted: Object) -> None:
        """Refuse to change an object that the run does not own, which would be deleted with the run."""
        before = self.cluster.get(wanted["apiVersion"], wanted["kind"], wanted["metadata"]["name"])
        if before is not None and not is_owned(before, run["metadata"]["uid"]):
            raise UsageError(clash_of(wanted))

    def _job(self, run: Mapping[str, Any]) -> JobFound:
        """Return the job of the run, of whichever kind it is now."""
        found: list[Mapping[str, Any] | None] = []
        for api, kind in JOB_KINDS.values():
            try:
                found.append(self.cluster.get(api, kind, run["metadata"]["name"]))
            except UnknownKind:  # its controller is not installed, so there is none
                found.append(None)
        return job_of(run["metadata"]["uid"], *found)

    def _progress(self, pods: Sequence[Mapping[str, Any]], port: int) -> Object:
        running = [
            pod for pod in pods if pod["status"].get("phase") == "Running" and pod["status"].get("podIP")
        ]
        addresses = [pod["status"]["podIP"] for pod in sorted(running, key=index_of)]
        found = ask_pods(addresses, port) if port else {}
        if not found.get("lastCheckpoint"):
            found.pop("lastCheckpoint", None)
        return dict(found)

    def _show(self, run: Mapping[str, Any], decision: RunDecision, seen: RunSeen, changes: Object) -> None:
        """Write the status, if it is another."""
        status = {
            "phase": decision.phase.value,
            "message": decision.cause[:_MAX_CHARACTERS],
            "nodes": sum(pod.trains for pod in seen.pods),
            "wantedNodes": seen.nodes or (seen.job.nodes if seen.job else ""),
            "observedGeneration": run["metadata"].get("generation", 0),
            **changes,
        }
        status = {key: value for key, value in status.items() if value != ""} | {
            "message": status["message"] or "-"
        }
        before = run.get("status") or {}
        if any(before.get(key) != value for key, value in status.items()):
            self.cluster.set_status(API, KIND, run["metadata"]["name"], status)

    def _tell(self, run: Mapping[str, Any], decision: RunDecision, seen: RunSeen, start: int) -> None:
        status = run.get("status") or {}
        is_told = decision.cause[:_MAX_CHARACTERS] == status.get("message")
        if seen.invalid and seen.invalid in decision.cause and not is_told:
            self._event(run, RunPhase.INVALID.value, decision.cause, start, is_warning=True)
        if decision.act not in (RunAction.NOTHING, RunAction.RELEASE):
            self._event(
                run, decision.act.value, decision.cause, start, is_warning=decision.act is RunAction.EXCLUDE
            )
        elif decision.phase.value != status.get("phase") and decision.phase is not RunPhase.INVALID:
            is_bad = decision.phase is RunPhase.FAILED
            self._event(run, decision.phase.value, decision.cause or "-", start, is_warning=is_bad)

    def _event(
        self, run: Mapping[str, Any], reason: str, message: str, start: int, *, is_warning: bool = False
    ) -> None:
        meta = run["metadata"]
        said = f"{meta['uid']}/{meta.get('generation', 0)}/{start}/{reason}/{message}"
        now = datetime.fromtimestamp(clock.unix_seconds(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.cluster.create(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": f"{meta['name']}.{hashlib.sha256(said.encode()).hexdigest()[:16]}"},
                "involvedObject": {
                    "apiVersion": API,
                    "kind": KIND,
                    "name": meta["name"],
                    "namespace": self.cluster.namespace,
                    "uid": meta["uid"],
                },
                "type": "Warning" if is_warning else "Normal",
                "reason": reason,
                "message": message[:_MAX_CHARACTERS],
                "source": {"component": "penstock-operator"},
                "firstTimestamp": now,
                "lastTimestamp": now,
                "count": 1,
            }
        )


def planned(run: Mapping[str, Any], plan: Planner) -> tuple[RunPlan | None, str]:
    """Return what a run asks for, or why it cannot be; neither, if it is deleted."""
    if "deletionTimestamp" in run["metadata"]:
        return None, ""
    try:
        found = plan(run, _excluded(run))
        render_kubernetes(found.spec)
    except PenstockError as error:
        return None, str(error)
    except Exception as error:  # whatever a recipe makes our code raise concerns this run only
        _log.warning(
            "run_unread",
            "The specification of run {run} cannot be read",
            run=run["metadata"]["name"],
            exc_info=True,
        )
        return None, f"The specification cannot be read: {type(error).__name__}: {error}"
    return found, ""


def _excluded(run: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple((run.get("status") or {}).get("excludedNodes") or ())


def _seen(
    run: Mapping[str, Any],
    plan: RunPlan | None,
    invalid: str,
    found: JobFound,
    pods: Sequence[Mapping[str, Any]],
) -> RunSeen:
    return RunSeen(
        digest=digest_of(run) if plan else "",
        nodes=str(plan.spec.nodes) if plan else "",
        least=plan.spec.nodes.least if plan else 1,
        invalid=invalid,
        is_suspended=bool(run["spec"].get("suspend")),
        is_deleted="deletionTimestamp" in run["metadata"],
        excluded=_excluded(run),
        job=_job_seen(found.job, pods, is_leaving=found.is_leaving) if found.job else None,
        pods=[_pod_seen(pod) for pod in pods],
    )


def _objects(run: Mapping[str, Any], spec: RunSpec) -> list[Object]:
    """Return the objects of a run, owned by it: they are deleted with it, whoever is there to do so."""
    found = []
    for rendered in render_kubernetes(spec).objects:
        owned = json.loads(json.dumps(rendered))
        owned["metadata"]["ownerReferences"] = [_owner(run)]
        found.append(owned)
    return found


def _owner(run: Mapping[str, Any]) -> Object:
    return {
        "apiVersion": API,
        "kind": KIND,
        "name": run["metadata"]["name"],
        "uid": run["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def digest_of(run: Mapping[str, Any]) -> str:
    """Return a digest of what is asked for: the specification, and the nodes that are excluded.

    Not of the rendered objects, which another release renders differently: it would restart every run.
    """
    wanted = {key: value for key, value in run["spec"].items() if key != "suspend"}
    text = json.dumps([wanted, sorted(_excluded(run))], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _job_seen(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], *, is_leaving: bool) -> JobSeen:
    state, marks = state_of(job, pods), job["metadata"].get("annotations") or {}
    return JobSeen(
        digest=marks.get(_DIGEST, ""),
        nodes=marks.get(_NODES, ""),
        is_leaving=is_leaving,
        end="" if state.is_live else state.status,
        reason=state.reason,
    )


def _pod_seen(pod: Mapping[str, Any]) -> PodSeen:
    meta, status = pod["metadata"], pod.get("status") or {}
    created = datetime.fromisoformat(str(meta["creationTimestamp"])).timestamp()
    return PodSeen(
        name=meta["name"],
        index=index_of(pod),
        node=pod["spec"].get("nodeName") or "",
        phase=status.get("phase", "Pending"),
        is_leaving="deletionTimestamp" in meta,
        waited_s=math.floor(clock.unix_seconds() - created),
        running_s=_running_s(status),
        unfit=_unfit(status),
        slow_nodes=_slow_nodes(status),
    )


def _running_s(status: Mapping[str, Any]) -> float:
    """Return the seconds since the containers of a pod started; 0: one does not run."""
    starts = [
        ((container.get("state") or {}).get("running") or {}).get("startedAt")
        for container in status.get("containerStatuses") or []
    ]
    if not starts or None in starts:
        return 0.0
    last = max(datetime.fromisoformat(str(start)).timestamp() for start in starts)
    return float(max(0, math.floor(clock.unix_seconds() - last)))


def _ends(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return how the containers of a pod ended, those that did."""
    states = [container.get("state") or {} for container in status.get("containerStatuses") or []]
    return [state["terminated"] for state in states if state.get("terminated")]


def _slow_nodes(status: Mapping[str, Any]) -> dict[str, str]:
    """Return the nodes that the preflight in a pod, which failed by it, named to be left out, and why."""
    lines = [
        line
        for end in _ends(status)
        if end.get("exitCode")
        for line in str(end.get("message") or "").splitlines()
    ]
    named = [line.removeprefix(SLOW_NODE).partition(": ") for line in lines if line.startswith(SLOW_NODE)]
    return {node: why for node, _, why in named}


def _unfit(status: Mapping[str, Any]) -> str:
    """Return what the checks of a pod found wrong with its node; empty: nothing."""
    for ended in _ends(status):
        if ended.get("exitCode") == EXIT_UNFIT:
            paragraph = str(ended.get("message") or "").rpartition(_COMPLAINT)[2]
            return " ".join(paragraph.split()) or "its preflight failed; see the pod's log"
    return ""
