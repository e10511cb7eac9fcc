"""Kubernetes as an engine, through its API server: submit, state, cancel, resize.

Submitting is: look (claims, secrets, the queue's quota), let the server try every object (dry run), record
the run in its folder, apply the objects, and hand all to the job as its owner, so that nothing outlives it.
If one is refused, those applied before it are deleted.
"""

import secrets
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from penstock.core import clock
from penstock.core.errors import PenstockError, UsageError, nearest
from penstock.core.files import write_atomic
from penstock.core.log import EventLog
from penstock.core.units import plural
from penstock.launch.engines.engine import JobState, QueuedJob
from penstock.launch.engines.kubernetes_api import (
    GLOBAL_KINDS,
    ClusterConnection,
    Object,
    UnknownKind,
    owners_of,
)
from penstock.launch.engines.kubernetes_queue import check_quota, quota_of
from penstock.launch.engines.kubernetes_state import (
    JOB_KINDS,
    cluster_of,
    ended_state,
    pods_of,
    state_of,
)
from penstock.launch.job_folder import Job, JobFolder
from penstock.launch.pods.pod import PodSpec
from penstock.launch.render.jobset import has_key, key_secret
from penstock.launch.render.kubernetes import RECIPE_FILE, check_volumes, pod_of, render_kubernetes
from penstock.launch.render.pod_template import INSTANCE, TRAINER, code_name
from penstock.launch.render.rendered import Rendered
from penstock.launch.rendezvous.signed import new_key
from penstock.launch.spec import NodeRange, RunSpec

log = EventLog(__name__)

_POLL_S = 1.0
_AFTER_GRACE_S = 60.0


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
    api, kind = JOB_KINDS[pod_of(spec).api]
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
    key = _new_key(spec, cluster)
    try:
        _apply(objects, key, cluster, made)
        folder.write_job(job)
    except BaseException:
        for found in reversed(made):
            kind, name = found["kind"], found["metadata"]["name"]
            try:
                cluster.delete(found["apiVersion"], kind, name)
            except PenstockError as error:  # the first error is the one to tell
                log.warning(
                    "object_left",
                    "{kind} {object} of the run may be left: {error}",
                    kind=kind,
                    object=name,
                    error=error,
                )
        raise
    folder.log_event(
        "submitted", cause=f"to Kubernetes, {kind} {spec.name} of {where}", nodes=str(spec.nodes)
    )
    return spec.name


def _apply(
    objects: Sequence[Object], key: Sequence[Object], cluster: ClusterConnection, made: list[Object]
) -> None:
    """Apply objects, the job last, and hand them to it; `made` has the new ones, also after an error."""
    for found in key:
        made.append(found)
        cluster.create(found)
    for found in objects:
        if cluster.get(found["apiVersion"], found["kind"], found["metadata"]["name"]) is None:
            made.append(found)  # also if the answer is lost: the server may have made it
        applied = cluster.apply(found)
    for found in objects[:-1]:
        if found["kind"] not in GLOBAL_KINDS and not cluster.own(found, applied):
            cluster.apply(found)  # collected just now, as its earlier owner is gone
            cluster.own(found, applied)
    for found in key:
        cluster.own(found, applied, is_new=True)


def _new_key(spec: RunSpec, cluster: ClusterConnection) -> list[Object]:
    """Return the Secret with a new key for the pods of a run, once that of an earlier job is deleted.

    Raises:
        UsageError: there is one that Penstock did not make.
    """
    if not has_key(spec):
        return []
    found = key_secret(spec, cluster.namespace, new_key())
    try:
        cluster.get("v1", "Secret", found["metadata"]["name"])
    except PenstockError:  # reading secrets is often forbidden
        pass
    else:
        _check_free(cluster, [found], spec.name)
    cluster.delete("v1", "Secret", found["metadata"]["name"])
    return [found]


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
    is_replaced = found["kind"] in (*(kind for _, kind in JOB_KINDS.values()), "TrainingRuntime")
    if not is_replaced or cluster.get(found["apiVersion"], found["kind"], meta["name"]) is None:
        return found
    return {**found, "metadata": {**meta, "name": f"try-{secrets.token_hex(4)}"}}


def _check_ended(cluster: ClusterConnection, name: str) -> None:
    """Refuse a name that a job of either kind has until it ends: the two would share one recipe.

    Raises:
        PenstockError: the message names the job.
    """
    for api, kind in JOB_KINDS.values():
        with suppress(UnknownKind):
            found = cluster.get(api, kind, name)
            if found is not None and ended_state(found) is None:
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
        check_quota(spec, quota_of(cluster, spec.queue))


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


def _remove(cluster: ClusterConnection, spec: RunSpec, *, grace_s: int | None = None) -> None:
    """Delete a job with its objects, and wait until they and its pods are gone.

    What the job owns is not left to the garbage collector: it may come after the next job of this name took
    the objects over.
    """
    api, kind = JOB_KINDS[pod_of(spec).api]
    job, pods = cluster.get(api, kind, spec.name), pods_of(cluster, spec.name)
    owned = [found for found in render_kubernetes(spec).objects[:-1] if _is_owned(cluster, found, job)]
    cluster.delete(api, kind, spec.name)
    if grace_s is not None:
        for pod in pods:
            cluster.delete("v1", "Pod", pod["metadata"]["name"], grace_s=grace_s)
    end = clock.monotonic() + spec.grace_s + _AFTER_GRACE_S
    while cluster.get(api, kind, spec.name) is not None or pods_of(cluster, spec.name):
        if clock.monotonic() > end:
            left = ", ".join(pod["metadata"]["name"] for pod in pods_of(cluster, spec.name))
            raise PenstockError(
                f"Pods of {spec.name} are still there: {left or 'none, but its object is'}",
                fix="See `penstock launch status`; --now kills them without saving.",
            )
        clock.sleep(_POLL_S)
    for found in owned:
        cluster.delete(found["apiVersion"], found["kind"], found["metadata"]["name"])
    while any(_is_owned(cluster, found, job) for found in owned) and clock.monotonic() < end:
        clock.sleep(_POLL_S)


def _is_owned(cluster: ClusterConnection, found: Object, job: Object | None) -> bool:
    """True if an object exists, and a job is its only owner."""
    if job is None or found["kind"] in GLOBAL_KINDS:
        return False
    there = cluster.get(found["apiVersion"], found["kind"], found["metadata"]["name"])
    return there is not None and [one["uid"] for one in owners_of(there)] == [job["metadata"]["uid"]]


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
        cluster, pod = cluster_of(job), pod_of(folder.spec())
        api, kind = JOB_KINDS[pod.api]
        found = cluster.get(api, kind, job.ident)
        return state_of(found, pods_of(cluster, job.ident))

    def jobs(self, host: str, _known: Collection[str] = ()) -> dict[str, QueuedJob]:
        """Return the jobs of Penstock in a namespace, whoever submitted them."""
        cluster = cluster_of(Job(engine="kubernetes", ident="", host=host, submitted_at=""))
        labels = {"app.kubernetes.io/managed-by": "penstock", "app.kubernetes.io/component": TRAINER}
        pods, found = cluster.all("v1", "Pod", labels), {}
        for api, kind in JOB_KINDS.values():
            with suppress(UnknownKind):
                for job in cluster.all(api, kind, labels):
                    name = job["metadata"]["name"]
                    own = [pod for pod in pods if pod["metadata"]["labels"].get(INSTANCE) == name]
                    found[name] = QueuedJob(state=state_of(job, own))
        return found

    def cancel(self, job: Job, folder: JobFolder, *, now: bool) -> str:
        """Delete the job: its pods save, and end."""
        self.state(job, folder).check_stoppable(job)
        _remove(cluster_of(job), folder.spec(), grace_s=0 if now else None)
        how = "deleted without saving" if now else "deleted, after a save request to its pods"
        folder.log_event("finish", cause=how)
        return f"killed job {job.ident}" if now else f"job {job.ident} is {how}"

    def resize(self, job: Job, folder: JobFolder, nodes: NodeRange) -> str:
        """Stop the job after saving, and submit it for another number of nodes."""
        recipe = (folder.path / RECIPE_FILE).read_text(encoding="utf-8")
        spec = folder.spec().resized(nodes)
        spec = replace(spec, pod=replace(pod_of(spec), recipe=recipe))
        cluster, rendered = cluster_of(job), render_kubernetes(spec)
        check_cluster(spec, cluster)  # before anything is stopped
        try_objects([_for_trial(cluster, found) for found in rendered.objects], cluster)
        code = _code_of(cluster, pod_of(spec))  # which is deleted with the last job that has it
        done = self.cancel(job, folder, now=False)
        submit(spec, folder, rendered, cluster, more=code)
        return f"{done}; submitted it for {nodes} nodes"


ENGINE = _Kubernetes()
