"""Kubernetes as an engine, through its API server: submit, state, logs, cancel, resize.

Submitting is: look (claims, secrets, the queue's quota), let the server try every object (dry run), record
the run in its folder, apply the objects, and hand all to the job as its owner, so that nothing outlives it.
If one is refused, those applied before it are deleted. Needs the package lightkube; nothing else in
`penstock launch` does.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from penstock.core import clock
from penstock.core.errors import PenstockError, UsageError, nearest
from penstock.core.files import write_atomic
from penstock.core.units import plural
from penstock.launch.engines.engine import JobState
from penstock.launch.job_folder import Job, JobFolder
from penstock.launch.pod import PodSpec
from penstock.launch.pod_node import EVENT, PROGRESS, rank_mark
from penstock.launch.render.kubernetes import RECIPE_FILE, check_volumes, pod_of, render_kubernetes
from penstock.launch.render.pod_template import code_name, labels_of
from penstock.launch.render.rendered import Rendered
from penstock.launch.spec import NodeRange, RunSpec

if TYPE_CHECKING:
    from lightkube import Client

Object = Mapping[str, Any]  # Any: JSON
_MANAGER = "penstock"
ANSWER_S = 15.0
_LOOK_S = 1.0
_AFTER_GRACE_S = 60.0
_LOOK_AT_PODS_S = 2.0
_LAST_LINES_S = 30.0
"""Longest silence of a log after the end of its job; a node that is gone leaves one open for ever."""
_KINDS = {
    "ConfigMap": "configmaps",
    "Pod": "pods",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "Secret": "secrets",
    "Service": "services",
    "Deployment": "deployments",
    "HorizontalPodAutoscaler": "horizontalpodautoscalers",
    "JobSet": "jobsets",
    "TrainJob": "trainjobs",
    "TrainingRuntime": "trainingruntimes",
    "NetworkPolicy": "networkpolicies",
    "NetworkAttachmentDefinition": "network-attachment-definitions",
    "ResourceClaimTemplate": "resourceclaimtemplates",
    "InferenceService": "inferenceservices",
    "LocalQueue": "localqueues",
    "ClusterQueue": "clusterqueues",
    "Cohort": "cohorts",
    "MultiNicNetwork": "multinicnetworks",
    "TrainingRun": "trainingruns",
    "Event": "events",
    "Lease": "leases",
}
_GLOBAL = ("ClusterQueue", "Cohort", "MultiNicNetwork")
_APIS = {
    "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
}
_KUEUE = ("v1beta2", "v1beta1")
_NOT_STARTED, _NOT_FOUND, _FORBIDDEN, _CONFLICT = 400, 404, 403, 409


class UnknownKind(PenstockError):
    """The cluster does not serve this kind of object: its controller is not installed."""


@dataclass(frozen=True, slots=True)
class ClusterConnection:
    """A cluster and a namespace of it."""

    client: "Client"
    server: str
    context: str
    namespace: str

    def get(self, api: str, kind: str, name: str) -> Object | None:
        """Return an object; None: there is none."""
        with _refusals(self, f"{kind} {name}", api):
            try:
                found: Object = self.client.get(_resource(api, kind), name)
            except _api_error() as error:
                if error.status.code == _NOT_FOUND:
                    return None
                raise
            return found

    def all(self, api: str, kind: str, labels: Mapping[str, str] | None = None) -> list[Object]:
        """Return the objects of a kind with some labels."""
        with _refusals(self, kind, api):
            return list(self.client.list(_resource(api, kind), labels=dict(labels or {})))

    def apply(self, found: Object, *, is_tried: bool = False) -> Object:
        """Create or change an object; `is_tried`: the server only says whether it would."""
        name = found["metadata"]["name"]
        with _refusals(self, f"{found['kind']} {name}", found["apiVersion"]):
            kind = _resource(found["apiVersion"], found["kind"])
            made: Object = self.client.apply(
                kind.from_dict(found), field_manager=_MANAGER, force=True, dry_run=is_tried
            )
            return made

    def create(self, found: Object) -> bool:
        """Create an object; False: there is one of that name."""
        with _refusals(self, f"{found['kind']} {found['metadata']['name']}", found["apiVersion"]):
            return self._unless_conflict(self.client.create, found)

    def replace(self, found: Object) -> bool:
        """Replace an object; False: it is not of the version that this one was made of."""
        with _refusals(self, f"{found['kind']} {found['metadata']['name']}", found["apiVersion"]):
            return self._unless_conflict(self.client.replace, found)

    def _unless_conflict(self, write: Callable[[Any], Any], found: Object) -> bool:
        try:
            write(_resource(found["apiVersion"], found["kind"]).from_dict(found))
        except _api_error() as error:
            if error.status.code == _CONFLICT:
                return False
            raise
        return True

    def set_status(self, api: str, kind: str, name: str, change: Object) -> None:
        """Merge a change into the status of an object, if it exists."""
        from lightkube.types import PatchType

        with _refusals(self, f"the status of {kind} {name}"):
            try:
                of_status = _resource(api, kind).Status
                self.client.patch(of_status, name, {"status": change}, patch_type=PatchType.MERGE)
            except _api_error() as error:
                if error.status.code != _NOT_FOUND:
                    raise

    def delete(self, api: str, kind: str, name: str, *, grace_s: int | None = None) -> None:
        """Delete an object if it exists, and what it owns."""
        with _refusals(self, f"{kind} {name}", api):
            try:
                self.client.delete(_resource(api, kind), name, grace_period=grace_s)
            except _api_error() as error:
                if error.status.code != _NOT_FOUND:
                    raise

    def own(self, found: Object, owner: Object) -> bool:
        """Make an object one that is deleted with its owner, or its last one; False: it is gone."""
        reference = {key: owner["metadata"][key] for key in ("name", "uid")}
        reference |= {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
        name = found["metadata"]["name"]
        with _refusals(self, f"{found['kind']} {name}"):
            kind = _resource(found["apiVersion"], found["kind"])
            from lightkube.types import PatchType

            try:
                kept = [one for one in _owners(self.client.get(kind, name)) if one["uid"] != reference["uid"]]
                change = {"metadata": {"ownerReferences": [*kept, reference]}}
                self.client.patch(kind, name, change, patch_type=PatchType.MERGE)
            except _api_error() as error:
                if error.status.code != _NOT_FOUND:
                    raise
                return False
            return True


@contextmanager
def _refusals(cluster: "ClusterConnection", what: str, api: str = "") -> Iterator[None]:
    """Turn errors of the API server, and of the way to it, into ours."""
    try:
        yield
    except _api_error() as error:
        message = error.status.message or str(error)
        if error.status.code == _NOT_FOUND and "could not find the requested resource" in message:
            message = f"it does not know {api or 'this kind'}: its controller is not installed"
        is_forbidden = error.status.code == _FORBIDDEN
        without = " Or do without: --network-policy none." if what.startswith("NetworkPolicy") else ""
        raise PenstockError(
            f"The API server refused {what} in namespace {cluster.namespace}: {message}",
            fix=f"Ask for the right: kubectl auth can-i --list.{without}"
            if is_forbidden
            else "Correct what it names.",
        ) from None
    except _httpx().HTTPStatusError as error:  # an answer without a Status: there is no such path
        if error.response.status_code != _NOT_FOUND:
            raise _unreachable(cluster.server, error) from None
        raise UnknownKind(
            f"The cluster does not know {api or 'the kind'} of {what}: its controller is not installed",
            fix="Install it, or choose another --api or network provider.",
        ) from None
    except _httpx().HTTPError as error:
        raise _unreachable(cluster.server, error) from None


def _owners(found: Object) -> Sequence[Object]:
    return found["metadata"].get("ownerReferences") or []


def _api_error() -> Any:  # type[ApiError], of a package that may be absent
    from lightkube.core.exceptions import ApiError

    return ApiError


def _httpx() -> Any:  # the client's HTTP library, under any of its names
    from lightkube.core import exceptions

    return vars(exceptions)["httpx"]


def _unreachable(server: str, error: BaseException) -> PenstockError:
    return PenstockError(
        f"The cluster at {server} cannot be reached: {str(error).strip() or type(error).__name__}",
        fix="Check the network and `kubectl cluster-info`, or name another cluster by KUBECONFIG.",
    )


@cache
def _resource(api: str, kind: str) -> Any:  # Any: lightkube makes the class, once in a process
    from lightkube.generic_resource import (
        create_global_resource,
        create_namespaced_resource,
        get_generic_resource,
    )

    if (known := get_generic_resource(api, kind)) is not None:  # type: ignore[no-untyped-call]
        return known
    group, _, version = api.rpartition("/")
    make = create_global_resource if kind in _GLOBAL else create_namespaced_resource
    return make(group, version, kind, _KINDS[kind])


def connect(namespace: str, *, context: str = "", answer_s: float = ANSWER_S) -> ClusterConnection:
    """Return a connection to the cluster of KUBECONFIG, ~/.kube/config, or of this pod.

    Args:
        answer_s: seconds that the API server may be silent before a request is given up.

    Raises:
        PenstockError: there is no client, or no configuration.
    """
    try:
        from lightkube import Client, KubeConfig
        from lightkube.core.exceptions import ConfigError
        from yaml import YAMLError
    except ImportError:
        raise PenstockError(
            "Kubernetes needs the package lightkube, which is not installed",
            fix="pip install 'penstock[kubernetes]'; --dry-run needs none.",
        ) from None
    try:
        config = KubeConfig.from_env().get(context or None)
        client = Client(
            config, namespace=namespace, timeout=_httpx().Timeout(answer_s), field_manager=_MANAGER
        )
    except (ConfigError, OSError, ValueError, LookupError, TypeError, AttributeError, YAMLError) as error:
        said = " ".join(str(error).split())  # of a file that is not YAML, or holds something else
        raise PenstockError(
            f"No cluster is configured: {said or type(error).__name__}",
            fix="Name one by KUBECONFIG; `kubectl config current-context` shows it.",
        ) from None
    assert config is not None  # a name was found, or the current one
    return ClusterConnection(client, config.cluster.server, config.context_name, namespace)


def submit(
    spec: RunSpec,
    folder: JobFolder,
    rendered: Rendered,
    cluster: ClusterConnection,
    *,
    more: Sequence[Object] = (),
) -> str:
    """Apply the objects of a run, and record it in its folder; return its name.

    A job of this name that has ended is deleted before. If the cluster refuses an object, or the record
    cannot be written, no new object is left.

    Args:
        more: objects that the run refers to and shares with others, such as its code.

    Raises:
        PenstockError: the cluster cannot be reached, or refuses.
        UsageError: it could never start.
        OSError: the folder cannot be written.
    """
    objects = [*more, *rendered.objects]
    try_run(spec, objects, cluster)
    api, kind = _APIS[pod_of(spec).api]
    old = cluster.get(api, kind, spec.name)
    folder.make()
    folder.forget()
    folder.write_spec(spec)
    write_atomic(folder.path / RECIPE_FILE, pod_of(spec).recipe)
    if old is not None:
        _remove(cluster, spec, grace_s=0)
    where = f"{cluster.context}/{cluster.namespace}"
    job = Job(engine="kubernetes", ident=spec.name, host=where, submitted_at=clock.utc_now())
    made: list[Object] = []
    try:
        for found in objects:
            is_new = cluster.get(found["apiVersion"], found["kind"], found["metadata"]["name"]) is None
            applied = cluster.apply(found)
            if is_new:
                made.append(found)
        for found in objects[:-1]:
            if found["kind"] not in _GLOBAL and not cluster.own(found, applied):
                cluster.apply(found)  # collected just now, as its earlier owner is gone
                cluster.own(found, applied)
        folder.write_job(job)
    except BaseException:
        for found in reversed(made):
            cluster.delete(found["apiVersion"], found["kind"], found["metadata"]["name"])
        raise
    folder.log_event(
        "submitted", cause=f"to Kubernetes, {kind} {spec.name} of {where}", nodes=str(spec.nodes)
    )
    return spec.name


def try_run(spec: RunSpec, objects: Sequence[Object], cluster: ClusterConnection) -> str:
    """Check all that could keep a run from being submitted, and start nothing; return what the server says.

    Raises:
        PenstockError: the cluster cannot be reached, or refuses.
        UsageError: it could never start.
    """
    check_cluster(spec, cluster)
    _check_ended(cluster, spec.name)
    _check_free(cluster, objects, spec.name)
    return try_objects([_for_trial(cluster, found) for found in objects], cluster)


def _for_trial(cluster: ClusterConnection, found: Object) -> Object:
    """Return an object as the server can try it.

    A job that exists is deleted before the next one is applied, as most of its fields cannot be changed:
    until then the next one can be tried under another name only.
    """
    meta = found["metadata"]
    is_replaced = found["kind"] in (*(kind for _, kind in _APIS.values()), "TrainingRuntime")
    if not is_replaced or cluster.get(found["apiVersion"], found["kind"], meta["name"]) is None:
        return found
    return {**found, "metadata": {**meta, "name": f"try-{secrets.token_hex(4)}"}}


def _check_ended(cluster: ClusterConnection, name: str) -> None:
    """Refuse a name that a job of either kind has until it ends: the two would share one recipe.

    Raises:
        PenstockError: the message names the job.
    """
    for api, kind in _APIS.values():
        with suppress(UnknownKind):
            found = cluster.get(api, kind, name)
            if found is not None and _ended(found) is None:
                raise PenstockError(
                    f"{kind} {name} exists in namespace {cluster.namespace}, and has not ended",
                    fix="Stop it (penstock launch cancel), or give another --name.",
                )


def _check_free(cluster: ClusterConnection, objects: Sequence[Object], name: str) -> None:
    """Refuse to take over objects that others made, which would be deleted with the run.

    Raises:
        UsageError: the message names one.
    """
    for found in objects:
        before = cluster.get(found["apiVersion"], found["kind"], found["metadata"]["name"])
        if before is None:
            continue
        meta = before["metadata"]
        owners = {(owner["kind"], owner["name"]) for owner in meta.get("ownerReferences") or []}
        is_ours = (meta.get("labels") or {}).get("app.kubernetes.io/managed-by") == "penstock"
        if ("TrainingRun", name) in owners or not (
            is_ours or owners & {("JobSet", name), ("TrainJob", name)}
        ):
            raise UsageError(
                f"{found['kind']} {meta['name']} exists in namespace {cluster.namespace}, and "
                "`penstock launch` did not make it",
                fix="Delete it, or give another --name.",
            )


def deploy(objects: Sequence[Object], cluster: ClusterConnection) -> None:
    """Create or change the objects of a server, after the API server has tried all of them.

    Raises:
        PenstockError: the cluster cannot be reached, or refuses one.
    """
    try_objects(objects, cluster)
    for found in objects:
        cluster.apply(found)


def try_objects(objects: Sequence[Object], cluster: ClusterConnection) -> str:
    """Let the API server try objects; return what it says.

    Raises:
        PenstockError: it would refuse one.
    """
    for found in objects:
        cluster.apply(found, is_tried=True)
    return f"the API server at {cluster.server} would take {plural(len(objects), 'object')}"


def check_cluster(spec: RunSpec, cluster: ClusterConnection) -> None:
    """Refuse a run that could never start in this cluster.

    Raises:
        UsageError: a claim, secret or queue is missing or does not fit.
    """
    pod = pod_of(spec)
    volumes = []
    for volume in pod.volumes:
        claim = cluster.get("v1", "PersistentVolumeClaim", volume.claim)
        if claim is None:
            known = [found["metadata"]["name"] for found in cluster.all("v1", "PersistentVolumeClaim")]
            raise UsageError(
                f"Namespace {cluster.namespace} has no PersistentVolumeClaim {volume.claim}",
                got=f"--volume {volume.claim}:{volume.path}",
                fix=nearest(volume.claim, known),
            )
        modes = claim["spec"].get("accessModes") or ["ReadWriteOnce"]
        shared = [mode for mode in modes if replace(volume, access_mode=mode).is_shared]
        volumes.append(replace(volume, access_mode=(shared or modes)[0]))
    check_volumes(replace(spec, pod=replace(pod, volumes=tuple(volumes))))
    for secret in spec.secrets:
        if secret.source.startswith("key:"):
            _check_secret(cluster, secret.name, secret.source.removeprefix("key:"))
    if spec.queue:
        check_quota(spec, _quota(cluster, spec.queue))


def _check_secret(cluster: ClusterConnection, variable: str, source: str) -> None:
    name, _, key = source.partition("/")
    try:
        found = cluster.get("v1", "Secret", name)
    except PenstockError:  # reading secrets is often forbidden, and pods read it by themselves
        return
    if found is None or key not in (found.get("data") or {}):
        missing = f"no Secret {name}" if found is None else f"no key {key} in Secret {name}"
        raise UsageError(
            f"Namespace {cluster.namespace} has {missing}, so no pod would start",
            got=f"--secret {variable}=key:{source}",
            fix=f"kubectl create secret generic {name} --from-literal={key}=...",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueQuota:
    """Upper limit of a queue of Kueue by resource: its own quota, plus the quota it may borrow."""

    queue: str
    amounts: Mapping[str, float]


def check_quota(spec: RunSpec, quota: QueueQuota | None) -> None:
    """Refuse a run for which its queue can never give enough.

    Raises:
        UsageError: the message has both amounts.
    """
    if quota is None:
        return
    pod = pod_of(spec)
    wanted = {pod.device: str(spec.processes), "cpu": pod.cpu, "memory": pod.memory}
    for name, amount in wanted.items():
        if not name or not amount or (name not in quota.amounts and name != pod.device):
            continue
        needed, most = spec.nodes.most * quantity(amount), quota.amounts.get(name, 0.0)
        if needed > most:
            raise UsageError(
                f"Queue {quota.queue} gives at most {most:g} of {name}, so the run would wait for ever: "
                f"{plural(spec.nodes.most, 'node')} of {amount} need {needed:g}",
                got=f"--nodes {spec.nodes}",
                fix="Ask for fewer, or for another --queue.",
            )


def quantity(text: str) -> float:
    """Return a quantity of Kubernetes as a number.

    >>> quantity("500m"), quantity("2Gi"), quantity("8")
    (0.5, 2147483648.0, 8.0)
    """
    match = re.fullmatch(r"([0-9.]+)(m|[kMGTPE]i?|Ki)?", text.strip())
    if not match:
        return float("inf")
    powers = {unit: index + 1 for index, unit in enumerate("kMGTPE")}
    unit = match[2] or ""
    if unit in ("", "m"):
        return float(match[1]) * (0.001 if unit else 1.0)
    base = 1024.0 if unit.endswith("i") else 1000.0
    return float(match[1]) * float(base ** powers[unit[0] if unit[0] != "K" else "k"])


def _quota(cluster: ClusterConnection, queue: str) -> QueueQuota | None:
    """Return what a queue can give; None: it may not be read.

    Raises:
        UsageError: there is no such queue.
    """
    for version in _KUEUE:
        api = f"kueue.x-k8s.io/{version}"
        try:
            local = cluster.get(api, "LocalQueue", queue)
            names = [found["metadata"]["name"] for found in cluster.all(api, "LocalQueue")]
        except PenstockError:
            continue
        if local is None:
            raise UsageError(
                f"Namespace {cluster.namespace} has no LocalQueue of that name",
                got=f"--queue {queue}",
                fix=nearest(queue, names),
            )
        try:
            queues = cluster.all(api, "ClusterQueue")
            name = str(local["spec"].get("clusterQueue"))
            if _has_own_quota(cluster, api, _cohort_of(name, queues)):
                return None
        except PenstockError:  # a right that users often lack
            return None
        return QueueQuota(queue=queue, amounts=amounts_of(name, queues))
    raise UsageError(
        f"The cluster has no Kueue, or you may not read queues of namespace {cluster.namespace}",
        got=f"--queue {queue}",
        fix="Leave --queue out, or install Kueue.",
    )


def _cohort_of(name: str, queues: Sequence[Object]) -> str:
    """Return the cohort of a ClusterQueue; empty: none."""
    mine: Object = next((found["spec"] for found in queues if found["metadata"]["name"] == name), {})
    return str(mine.get("cohortName") or mine.get("cohort") or "")


def _has_own_quota(cluster: ClusterConnection, api: str, cohort: str) -> bool:
    """True if a cohort is an object, which may have quotas and parents of its own: its sum is not known."""
    with suppress(UnknownKind):  # before Kueue 0.14
        return bool(cohort) and cluster.get(api, "Cohort", cohort) is not None
    return False


def amounts_of(name: str, queues: Sequence[Object]) -> dict[str, float]:
    """Return what a ClusterQueue can give of each resource, with what its cohort lends.

    >>> def queue(name, quota, cohort=""):
    ...     cpu = {"name": "cpu", "nominalQuota": quota}
    ...     groups = [{"coveredResources": ["cpu"], "flavors": [{"name": "any", "resources": [cpu]}]}]
    ...     return {"metadata": {"name": name}, "spec": {"cohortName": cohort, "resourceGroups": groups}}
    >>> amounts_of("a", [queue("a", "4", "all"), queue("b", 3, "all"), queue("c", 9)])
    {'cpu': 7.0}
    """
    by_name = {found["metadata"]["name"]: found["spec"] for found in queues}
    cohort = _cohort_of(name, queues)
    found: dict[str, float] = {}
    for other, spec in by_name.items():
        if other != name and (not cohort or (spec.get("cohortName") or spec.get("cohort")) != cohort):
            continue
        for group in spec.get("resourceGroups") or []:
            for flavor in group["flavors"]:
                for resource in flavor["resources"]:
                    amount = quantity(str(resource["nominalQuota"]))
                    found[resource["name"]] = found.get(resource["name"], 0.0) + amount
    return found


def _ended(job: Object) -> JobState | None:
    """Return the state of a JobSet or TrainJob that has ended; None: it has not."""
    for condition in (job.get("status") or {}).get("conditions") or []:
        if condition["status"] == "True" and condition["type"] in ("Completed", "Complete", "Failed"):
            status = "FAILED" if condition["type"] == "Failed" else "COMPLETED"
            said = condition.get("message") or condition.get("reason") or ""
            return JobState(is_live=False, status=status, reason=said)
    return None


def state_of(job: Object | None, pods: Sequence[Object]) -> JobState:
    """Return the state of a job from its object and its pods."""
    if job is None:
        return JobState(is_live=False, status="ENDED", reason="the cluster no longer has it")
    if (ended := _ended(job)) is not None:
        return ended
    if (job.get("spec") or {}).get("suspend"):
        return JobState(is_live=True, status="SUSPENDED", reason="it waits in its queue for quota")
    phases = [str((pod.get("status") or {}).get("phase", "Pending")) for pod in pods]
    counts = ", ".join(
        f"{phases.count(phase)} {phase.lower()}"
        for phase in dict.fromkeys(["Running", *phases])
        if phase in phases
    )
    why = next((reason for pod in pods if (reason := _why_pending(pod))), "")
    status = "RUNNING" if "Running" in phases else "PENDING"
    return JobState(
        is_live=True, status=status, reason=f"pods: {counts or 'none yet'}{f'; {why}' if why else ''}"
    )


def _why_pending(pod: Object) -> str:
    status = pod.get("status") or {}
    if status.get("phase", "Pending") != "Pending":
        return ""
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{pod['metadata']['name']}: {condition.get('message', condition.get('reason', ''))}"
    for container in status.get("containerStatuses") or []:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("message") or waiting.get("reason", "ContainerCreating") != "ContainerCreating":
            return f"{pod['metadata']['name']}: {waiting.get('reason')} {waiting.get('message', '')}".rstrip()
    return ""


def _pods(cluster: ClusterConnection, name: str) -> list[Object]:
    """Return the pods of a job by their index, the newest of each."""
    found = cluster.all("v1", "Pod", labels_of(name))
    newest = sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
    return [pod for _, pod in sorted({_index(pod): pod for pod in newest}.items())]


def _index(pod: Object) -> int:
    annotations = pod["metadata"].get("annotations") or {}
    return int(annotations.get("batch.kubernetes.io/job-completion-index", 0))


def _remove(cluster: ClusterConnection, spec: RunSpec, *, grace_s: int | None = None) -> None:
    """Delete a job with its objects, and wait until they and its pods are gone.

    What the job owns is not left to the garbage collector: it may come after the next job of this name took
    the objects over.
    """
    api, kind = _APIS[pod_of(spec).api]
    job, pods = cluster.get(api, kind, spec.name), _pods(cluster, spec.name)
    owned = [found for found in render_kubernetes(spec).objects[:-1] if _is_owned(cluster, found, job)]
    cluster.delete(api, kind, spec.name)
    if grace_s is not None:
        for pod in pods:
            cluster.delete("v1", "Pod", pod["metadata"]["name"], grace_s=grace_s)
    end = clock.monotonic() + spec.grace_s + _AFTER_GRACE_S
    while cluster.get(api, kind, spec.name) is not None or _pods(cluster, spec.name):
        if clock.monotonic() > end:
            left = ", ".join(pod["metadata"]["name"] for pod in _pods(cluster, spec.name))
            raise PenstockError(
                f"Pods of {spec.name} are still there: {left or 'none, but its object is'}",
                fix="See `penstock launch status`; --now kills them without saving.",
            )
        clock.sleep(_LOOK_S)
    for found in owned:
        cluster.delete(found["apiVersion"], found["kind"], found["metadata"]["name"])
    while any(_is_owned(cluster, found, job) for found in owned) and clock.monotonic() < end:
        clock.sleep(_LOOK_S)


def _is_owned(cluster: ClusterConnection, found: Object, job: Object | None) -> bool:
    """True if an object exists, and a job is its only owner."""
    if job is None or found["kind"] in _GLOBAL:
        return False
    there = cluster.get(found["apiVersion"], found["kind"], found["metadata"]["name"])
    return there is not None and [one["uid"] for one in _owners(there)] == [job["metadata"]["uid"]]


def _code_of(cluster: ClusterConnection, pod: PodSpec) -> list[Object]:
    """Return the ConfigMap with a run's code, as it was applied; none: the run has none.

    Raises:
        PenstockError: it is gone, and pods could not start.
    """
    if pod.code is None or pod.code.address:
        return []
    name = code_name(pod.code.sha256)
    found = cluster.get("v1", "ConfigMap", name)
    if found is None:
        raise PenstockError(
            f"Namespace {cluster.namespace} has no ConfigMap {name}, which holds the code of the run",
            fix="Cancel the run, and launch it again with --code.",
        )
    kept = {key: found["metadata"][key] for key in ("name", "namespace", "labels")}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": kept,
            **{key: found[key] for key in ("immutable", "binaryData")},
        }
    ]


class _Kubernetes:
    def state(self, job: Job, folder: JobFolder) -> JobState:
        """Return the job's condition, or what its pods do."""
        cluster, pod = _cluster_of(job), pod_of(folder.spec())
        api, kind = _APIS[pod.api]
        found = cluster.get(api, kind, job.ident)
        return state_of(found, _pods(cluster, job.ident))

    def cancel(self, job: Job, folder: JobFolder, *, now: bool) -> str:
        """Delete the job: its pods save, and end."""
        state = self.state(job, folder)
        if not state.is_live:
            raise PenstockError(f"Job {job.ident} has ended already: {state.status}, {state.reason}")
        _remove(_cluster_of(job), folder.spec(), grace_s=0 if now else None)
        how = "deleted without saving" if now else "deleted, after its pods were asked to save"
        folder.log_event("finish", cause=how)
        return f"killed job {job.ident}" if now else f"job {job.ident} is {how}"

    def resize(self, job: Job, folder: JobFolder, nodes: NodeRange) -> str:
        """Stop the job after saving, and submit it for another number of nodes."""
        recipe = (folder.path / RECIPE_FILE).read_text(encoding="utf-8")
        spec = folder.spec().resized(nodes)
        spec = replace(spec, pod=replace(pod_of(spec), recipe=recipe))
        cluster, rendered = _cluster_of(job), render_kubernetes(spec)
        check_cluster(spec, cluster)  # before anything is stopped
        try_objects([_for_trial(cluster, found) for found in rendered.objects], cluster)
        code = _code_of(cluster, pod_of(spec))  # which is deleted with the last job that has it
        done = self.cancel(job, folder, now=False)
        submit(spec, folder, rendered, cluster, more=code)
        return f"{done}; submitted it for {nodes} nodes"


def logs(job: Job, folder: JobFolder, rank: int, *, follow: bool) -> Iterator[str]:
    """Yield the lines that a rank printed, from the log of its pod.

    Raises:
        PenstockError: it has no pod, or has printed nothing.
    """
    spec, cluster = folder.spec(), _cluster_of(job)
    mark, count = rank_mark(rank), 0

    def pods() -> list[Object]:
        found = _pods(cluster, job.ident)
        if spec.nodes.is_elastic:  # a rank's pod is another one after each change of nodes
            return found
        return [pod for pod in found if _index(pod) == rank // spec.processes]

    def look() -> PodsStarted:
        api, kind = _APIS[pod_of(spec).api]
        found = cluster.get(api, kind, job.ident)  # first: pods that it made until then are seen
        started = [pod for pod in pods() if (pod.get("status") or {}).get("phase", "Pending") != "Pending"]
        names = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in started}
        return PodsStarted(names=names, is_over=found is None or _ended(found) is not None)

    if follow:
        lines = followed(look, lambda name: _lines(cluster, name, follow=True))
    else:
        names = [pod["metadata"]["name"] for pod in pods()]
        lines = (line for name in names for line in _lines(cluster, name, follow=False))
    for line in lines:
        if line.startswith(mark):
            count += 1
            yield line.removeprefix(mark)
    if not count and not follow:
        fix = f"It has {spec.most_ranks} ranks; `penstock launch status` shows its pods."
        raise PenstockError(f"Rank {rank} has printed nothing", fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodsStarted:
    """Pods of a job whose logs can be read."""

    names: Mapping[str, str]
    """By their uid."""
    is_over: bool
    """True if the job has ended: no other pod starts."""


def followed(
    look: Callable[[], PodsStarted], read: Callable[[str], Iterator[str]], *, pause_s: float = _LOOK_AT_PODS_S
) -> Iterator[str]:
    """Yield the lines of a job's pods as they come, also of pods that start later, until the job is over.

    Args:
        look: returns the pods that have started.
        read: returns the lines of the pod of a name until it ends.
        pause_s: seconds between two looks.

    Raises:
        BaseException: what looking or reading raised.
    """
    readers = _LogReaders(read)
    while True:
        now = look()
        for uid, name in now.names.items():
            readers.begin(uid, name)
        if now.is_over:
            yield from readers.last_lines()
            return
        yield from readers.lines_for(pause_s)


class _LogReaders:
    """Threads that read the logs of pods, one each; a pod that printed nothing may be read again."""

    def __init__(self, read: Callable[[str], Iterator[str]]) -> None:
        self._read = read
        self._found: SimpleQueue[str | BaseException | _PodRead] = SimpleQueue()
        self._begun: set[str] = set()
        self._num_open = 0

    def begin(self, uid: str, name: str) -> None:
        if uid not in self._begun:
            self._begun.add(uid)
            self._num_open += 1
            Thread(target=self._put_lines, args=(uid, name), daemon=True).start()

    def _put_lines(self, uid: str, name: str) -> None:
        is_empty = True
        try:
            for line in self._read(name):
                is_empty = False
                self._found.put(line)
            self._found.put(_PodRead(uid, is_empty))
        except BaseException as error:
            self._found.put(error)

    def lines_for(self, seconds: float) -> Iterator[str]:
        """Yield the lines that come within some seconds."""
        end = clock.monotonic() + seconds
        with suppress(Empty):
            while (left_s := end - clock.monotonic()) > 0:
                yield from self._next(left_s)

    def last_lines(self) -> Iterator[str]:
        """Yield lines until all logs have ended, or none has brought one for long."""
        with suppress(Empty):
            while self._num_open:
                yield from self._next(_LAST_LINES_S)

    def _next(self, timeout_s: float) -> Iterator[str]:
        found = self._found.get(timeout=timeout_s)
        if isinstance(found, BaseException):
            raise found
        if isinstance(found, str):
            yield found
            return
        self._num_open -= 1
        if found.is_empty:
            self._begun.discard(found.uid)


@dataclass(frozen=True, slots=True)
class _PodRead:
    """A pod was read to its end."""

    uid: str
    is_empty: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PodsTold:
    """Transitions and progress of a run, as its first pod printed them."""

    events: list[dict[str, Any]]  # Any: JSON values
    """Transitions, oldest first."""
    progress: dict[str, Any]
    """As `JobFolder.progress`; empty: no pod has printed it."""


def told(job: Job) -> PodsTold:
    """Return the run's transitions and its progress, from the newest first pod that has printed them.

    Raises:
        PenstockError: logs may not be read, or the cluster cannot be reached.
    """
    cluster = _cluster_of(job)
    first = [pod for pod in cluster.all("v1", "Pod", labels_of(job.ident)) if _index(pod) == 0]
    for pod in sorted(first, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True):
        lines = [*_lines(cluster, pod["metadata"]["name"], follow=False)]
        if progress := _printed(lines, PROGRESS):
            return PodsTold(events=_printed(lines, EVENT), progress=progress[-1])
    return PodsTold(events=[], progress={})


def _printed(lines: Sequence[str], mark: str) -> list[dict[str, Any]]:  # Any: JSON values
    """Return the objects in the lines that begin with a mark; a line that is cut has none."""
    found = []
    for line in lines:
        with suppress(ValueError):
            if line.startswith(mark) and isinstance(value := json.loads(line.removeprefix(mark)), dict):
                found.append(value)
    return found


def _lines(cluster: ClusterConnection, pod: str, *, follow: bool) -> Iterator[str]:
    with _refusals(cluster, f"the log of pod {pod}"):
        try:
            yield from cluster.client.log(pod, follow=follow)
        except _api_error() as error:
            if error.status.code not in (_NOT_STARTED, _NOT_FOUND):
                raise


def _cluster_of(job: Job) -> ClusterConnection:
    context, _, namespace = job.host.rpartition("/")
    return connect(namespace, context=context)


ENGINE = _Kubernetes()
