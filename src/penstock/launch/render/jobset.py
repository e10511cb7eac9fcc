"""Render a run as a JobSet: one Indexed Job, whose pods are the nodes of the run.

Restarts happen on three levels, the quickest first:

- ranks, in their pod: the supervisor of each node forks them again (launch/nodes/elastic_agent.py);
- a pod, by its Job, after Kubernetes' back-off where it failed; pods count their failures without a new
  checkpoint by themselves (launch/pods/failed.py), as a Job counts over its whole life;
- all pods, by the JobSet: only at the time limit.

A pod that ends with 2 (wrong recipe) or 76 (no progress) ends the JobSet: starting again would repeat it. The
index of a pod is its node's number, so rank order is the scheduler's order of pods. An elastic run is over
with its first pod, as others may wait for a node: Kubernetes 1.31 and later know `successPolicy`.
"""

import math
import re
from typing import Any

from penstock.core import env
from penstock.core.errors import UsageError
from penstock.core.network.settings import Setting
from penstock.launch.local import EXIT_STOPPED
from penstock.launch.pod_networks import Attachment
from penstock.launch.pods.failed import MAX_FAILED
from penstock.launch.pods.pod import PodSpec
from penstock.launch.render.pod_template import CONFIG, CONTAINER, Object, labels_of, object_of, pod_template
from penstock.launch.spec import RunSpec
from penstock.launch.supervise import EXIT_NO_PROGRESS

NODES = "node"
"""Name of the replicated job. Trainer 2.4 takes at most 20 characters, and knows its own step by this one."""
QUEUE = "kueue.x-k8s.io/queue-name"
NODE_VARIABLE = "PENSTOCK_NODE"
_KEY = "key"
_LABEL_MAX = 63
_SUFFIX = len("-xxxxx")  # of a pod
_FAILURES_PER_NODE = 100
"""Failed pods per node that end a run whose pods cannot count restarts, as without Penstock in the image."""
_NO_LIMIT = 2**31 - 1


def host_of(name: str, node: int = 0) -> str:
    """Return the host name of a pod, in the headless service that the JobSet controller makes.

    >>> host_of("first")
    'first-node-0-0.first'
    """
    return f"{name}-{NODES}-0-{node}.{name}"


def has_key(spec: RunSpec) -> bool:
    """Return True if pods of a run meet behind a key that they are given: one pod makes its own."""
    return spec.nodes.most > 1


def key_secret(spec: RunSpec, namespace: str, key: str) -> Object:
    """Return the Secret with the key of a run's rendezvous.

    It is not among the rendered objects, which are shown and compared: who applies them makes the key.
    """
    name, labels = _key_name(spec.name), labels_of(spec.name)
    return object_of("v1", "Secret", name, namespace, labels, stringData={_KEY: key})


def _key_name(name: str) -> str:
    return f"{name}-rendezvous"


def longest_name(num_nodes: int) -> int:
    """Return the most characters of a job's name with which the names of its pods are labels of DNS.

    >>> longest_name(4), longest_name(100)
    (48, 47)
    """
    return _LABEL_MAX - len(f"-{NODES}-0-{num_nodes - 1}") - _SUFFIX


def check_name(spec: RunSpec) -> None:
    """Refuse a name that the API server or a controller would refuse.

    Raises:
        UsageError: with the longest that would do.
    """
    longest = longest_name(spec.nodes.most)
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", spec.name) or len(spec.name) > longest:
        raise UsageError(
            f"The name of a job on Kubernetes has at most {longest} lower-case letters, digits and -, and "
            "begins with a letter: names of its pods are made of it",
            got=spec.name,
            fix="Give a shorter one by --name.",
        )


def jobset(spec: RunSpec, pod: PodSpec, attachment: Attachment) -> Object:
    """Return the JobSet of a run.

    Raises:
        UsageError: its name does not fit.
    """
    check_name(spec)
    labels = labels_of(spec.name) | ({QUEUE: spec.queue} if spec.queue else {})
    body = jobset_spec(spec, pod, attachment)
    return object_of("jobset.x-k8s.io/v1alpha2", "JobSet", spec.name, pod.namespace, labels, spec=body)


def jobset_spec(spec: RunSpec, pod: PodSpec, attachment: Attachment, *, job_labels: Any = None) -> Object:
    """Return the `spec` of a JobSet, which a TrainingRuntime contains, too.

    Args:
        job_labels: of the Job's template.
    """
    container: Object = {
        "name": CONTAINER,
        "command": [spec.python, "-m", "penstock", "launch", "pod", CONFIG],
    }
    if spec.work_dir:
        container["workingDir"] = spec.work_dir
    template = pod_template(
        spec.name,
        pod,
        container,
        config=spec.name,
        grace_s=spec.grace_s,
        attachment=attachment,
        num_devices=spec.processes,
        environment=spec.environment,
        secrets=spec.secrets,
        restart="Never",
    )
    of_job = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}}
    template["spec"]["containers"][0]["env"].append({"name": env.JOB, "valueFrom": of_job})
    if has_key(spec):
        of_key = {"secretKeyRef": {"name": _key_name(spec.name), "key": _KEY}}
        template["spec"]["containers"][0]["env"].append({"name": env.RENDEZVOUS_KEY, "valueFrom": of_key})
    if spec.doctor != "skip":  # the report names machines, not pods
        of_node = {"fieldRef": {"fieldPath": "spec.nodeName"}}
        template["spec"]["containers"][0]["env"].append({"name": NODE_VARIABLE, "valueFrom": of_node})
    num_nodes = spec.nodes.most
    job: Object = {
        "completionMode": "Indexed",
        "completions": num_nodes,
        "parallelism": num_nodes,
        "backoffLimit": _most_failures(spec),
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": _codes(2, EXIT_NO_PROGRESS)},
                {"action": "Ignore", "onExitCodes": _codes(EXIT_STOPPED)},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": template,
    }
    if spec.nodes.is_elastic:
        job["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    if spec.time_limit_s:
        job["activeDeadlineSeconds"] = math.ceil(spec.time_limit_s)
    rules = [
        {"name": "wrong_or_no_progress", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
        {"name": "pods_fail", "action": "FailJobSet", "onJobFailureReasons": ["BackoffLimitExceeded"]},
        {"name": "time_limit", "action": "RestartJobSet", "onJobFailureReasons": ["DeadlineExceeded"]},
    ]
    replicated: Object = {"name": NODES, "replicas": 1, "template": {"spec": job}}
    if job_labels:
        replicated["template"]["metadata"] = {"labels": job_labels}
    return {
        **({"ttlSecondsAfterFinished": math.ceil(spec.ttl_s)} if spec.ttl_s else {}),
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": spec.max_requeues,
            "restartStrategy": "BlockingRecreate",
            "rules": rules,
        },
        "replicatedJobs": [replicated],
    }


def _most_failures(spec: RunSpec) -> int:
    """Return how many pods may fail over a job's life; of an elastic run any number, as the others train."""
    return _NO_LIMIT if spec.nodes.is_elastic else _FAILURES_PER_NODE * spec.nodes.most


def _codes(*codes: int) -> Object:
    return {"containerName": CONTAINER, "operator": "In", "values": list(codes)}


def settings_of_jobset(spec: RunSpec) -> list[Setting]:
    """Return the settings of a JobSet, each with its reason."""
    found = [
        Setting(
            "terminationGracePeriodSeconds",
            str(math.ceil(spec.grace_s)),
            f"the grace: a step and a save within {spec.save_within_s:g} s, then the exit",
        ),
        Setting(
            "podFailurePolicy",
            "2, 76: end; 75, disruption: replace, not counted",
            "75 is a stop after saving; 76 is no progress, which a new pod would repeat",
        ),
        Setting(
            "backoffLimit",
            str(_most_failures(spec)),
            f"far: {MAX_FAILED} pods of a node that fail without a new checkpoint end the run",
        ),
        Setting("podReplacementPolicy", "Failed", "no two pods of one node at the same time"),
        Setting("maxRestarts", str(spec.max_requeues), "of all pods, at the time limit only: --max-requeues"),
        Setting(
            "restartStrategy",
            "BlockingRecreate",
            "all old pods are gone before new ones write to the run's folder",
        ),
        Setting(
            "rendezvous host", host_of(spec.name), "the first pod, by the headless service that JobSet makes"
        ),
    ]
    if has_key(spec):
        reason = "a Secret, made when the run is submitted: without it no node joins the rendezvous"
        found.append(Setting(env.RENDEZVOUS_KEY, _key_name(spec.name), reason))
    if spec.nodes.is_elastic:
        reason = "the run is over with the first pod: others may still wait for a node. Kubernetes >= 1.31"
        found.append(Setting("successPolicy", "succeededIndexes 0", reason))
    if spec.queue:
        reason = "Kueue starts all pods together, once its quota allows"
        found.append(Setting(QUEUE, spec.queue, reason))
    if spec.time_limit_s:
        value = str(math.ceil(spec.time_limit_s))
        reason = "--time-limit: all pods save, and start again; Kueue keeps their admission"
        found.append(Setting("activeDeadlineSeconds", value, reason))
    if spec.ttl_s:
        reason = "--ttl: the job, its objects and its pods' logs are deleted so long after the end"
        found.append(Setting("ttlSecondsAfterFinished", str(math.ceil(spec.ttl_s)), reason))
    return found
