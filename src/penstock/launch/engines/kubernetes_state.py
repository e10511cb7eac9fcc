"""State of a run's job on Kubernetes, from its object and its pods."""

from collections.abc import Mapping, Sequence

from penstock.launch.engines.engine import JobState
from penstock.launch.engines.kubernetes_api import ClusterConnection, Object, connect
from penstock.launch.job_folder import Job
from penstock.launch.render.pod_template import labels_of

JOB_KINDS: Mapping[str, tuple[str, str]] = {
    "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
}
"""Version of the API, and kind, of a run's job; by `PodSpec.api`."""
_INDEX = "batch.kubernetes.io/job-completion-index"


def cluster_of(job: Job) -> ClusterConnection:
    """Return a connection to the cluster to which a run was submitted."""
    context, _, namespace = job.host.rpartition("/")
    return connect(namespace, context=context)


def ended_state(job: Object) -> JobState | None:
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
    if (ended := ended_state(job)) is not None:
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


def pods_of(cluster: ClusterConnection, name: str) -> list[Object]:
    """Return the pods of a job by their index, the newest of each."""
    found = cluster.all("v1", "Pod", labels_of(name))
    newest = sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
    return [pod for _, pod in sorted({index_of(pod): pod for pod in newest}.items())]


def index_of(pod: Object) -> int:
    """Return the number of the node that a pod is."""
    annotations = pod["metadata"].get("annotations") or {}
    return int(annotations.get(_INDEX, 0))
