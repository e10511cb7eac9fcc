"""A stand-in for JobSet's controller, for tests: it makes the pods itself, as 1.20 has no Indexed Jobs.

As in JobSet: names, labels, annotations and host names of pods, the headless service, the failure policy with
its rules over `podFailurePolicy`, `backoffLimit` and `activeDeadlineSeconds` of a job, `successPolicy` by
indexes, new pods of a restart once all old ones are gone, success once all jobs succeeded, suspension. Left
out: everything else, among them networks without DNS, back-off before a failed pod is replaced, in-place
restarts, dependencies and Kueue.
"""

import threading
import time
from contextlib import contextmanager
from datetime import datetime

from tests.kubernetes import JOBSET

_POLL_S = 0.2
_PREFIX = "jobset.sigs.k8s.io"
_INDEX = "batch.kubernetes.io/job-completion-index"


@contextmanager
def jobset_controller(cluster):
    """Run the controller until the block ends; JobSet's definition is installed first."""
    cluster.install("jobset")
    ended, errors = threading.Event(), []

    def run():
        while not ended.wait(_POLL_S):
            try:
                for found in cluster.all("JobSet", api=JOBSET, namespace=""):
                    _reconcile(cluster, found)
            except OSError:  # the API server is away
                continue
            except Exception as error:
                errors.append(repr(error))
                raise

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        assert not errors, errors


def _reconcile(cluster, jobset):
    meta, spec, status = jobset["metadata"], jobset["spec"], jobset.get("status", {})
    if "deletionTimestamp" in meta or status.get("terminalState"):
        return
    name, namespace = meta["name"], meta["namespace"]
    pods = cluster.all("Pod", namespace=namespace, labels=f"{_PREFIX}/jobset-name={name}")
    pods = [pod for pod in pods if pod["metadata"]["ownerReferences"][0]["uid"] == meta["uid"]]
    restarts = status.get("restarts", 0)
    if spec.get("suspend"):
        _delete(cluster, pods)
        _tell(cluster, jobset, {"conditions": [_condition("Suspended")]})
        return
    _serve(cluster, jobset)
    mine = [pod for pod in pods if pod["metadata"]["labels"][f"{_PREFIX}/restart-attempt"] == str(restarts)]
    if before := [pod for pod in pods if pod not in mine]:
        _delete(cluster, before)
        return
    rows, failures = [], []
    for replicated in spec["replicatedJobs"]:
        jobs = range(replicated.get("replicas", 1))
        counts = {"succeeded": 0, "failed": 0, "active": 0, "ready": 0, "suspended": 0}
        for job in jobs:
            outcome = _job(cluster, jobset, replicated, job, restarts, mine)
            counts[outcome if outcome in counts else "failed"] += 1
            if outcome not in counts:
                failures.append((replicated["name"], outcome))
        rows.append({"name": replicated["name"], **counts})
    change = {"restarts": restarts, "replicatedJobsStatus": rows}
    if failures:
        change |= _after_failure(spec.get("failurePolicy", {}), failures, status)
    elif all(
        row["succeeded"] == one.get("replicas", 1)
        for row, one in zip(rows, spec["replicatedJobs"], strict=True)
    ):
        change |= {"terminalState": "Completed", "conditions": [_condition("Completed", "AllJobsCompleted")]}
    _tell(cluster, jobset, change)
    if change.get("terminalState"):
        _delete(cluster, [pod for pod in mine if pod["status"].get("phase") not in ("Succeeded", "Failed")])


def _job(cluster, jobset, replicated, job, restarts, pods):
    """Bring the pods of one job about; return active, ready, succeeded, or the reason of its failure."""
    template = replicated["template"]["spec"]
    labels = {
        f"{_PREFIX}/jobset-name": jobset["metadata"]["name"],
        f"{_PREFIX}/replicatedjob-name": replicated["name"],
        f"{_PREFIX}/job-index": str(job),
        f"{_PREFIX}/restart-attempt": str(restarts),
        "batch.kubernetes.io/controller-uid": f"{jobset['metadata']['uid']}-{job}-{restarts}",
    }
    mine = [pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]
    failed = [pod for pod in mine if _has_failed(pod)]
    actions = [_action(template.get("podFailurePolicy", {}), pod) for pod in failed]
    if _seconds_since_first(mine) > template.get("activeDeadlineSeconds", float("inf")):
        return "DeadlineExceeded"
    if "FailJob" in actions:
        return "PodFailurePolicy"
    if actions.count("Count") > template.get("backoffLimit", 6):
        return "BackoffLimitExceeded"
    leaving = [pod for pod in failed if pod["status"].get("phase") not in ("Succeeded", "Failed")]
    held = leaving if template.get("podReplacementPolicy") == "Failed" else []
    by_index = {
        pod["metadata"]["annotations"][_INDEX]: pod for pod in mine if pod not in failed or pod in held
    }
    wanted = [str(index) for index in range(template.get("completions", template.get("parallelism", 1)))]
    for index in wanted:
        if index not in by_index:
            _make(cluster, jobset, replicated, job, index, labels)
    phases = [by_index.get(index, {}).get("status", {}).get("phase") for index in wanted]
    for rule in template.get("successPolicy", {}).get("rules", []):
        needed = [by_index.get(index, {}).get("status", {}) for index in rule["succeededIndexes"].split(",")]
        if all(status.get("phase") == "Succeeded" for status in needed):
            return "succeeded"
    if all(phase == "Succeeded" for phase in phases):
        return "succeeded"
    return "ready" if all(_is_ready(by_index.get(index)) for index in wanted) else "active"


def _seconds_since_first(pods):
    made = [datetime.fromisoformat(pod["metadata"]["creationTimestamp"]).timestamp() for pod in pods]
    return time.time() - min(made, default=time.time())


def _make(cluster, jobset, replicated, job, index, labels):
    meta, spec = jobset["metadata"], jobset["spec"]
    template = replicated["template"]["spec"]["template"]
    host = f"{meta['name']}-{replicated['name']}-{job}-{index}"
    annotations = template.get("metadata", {}).get("annotations", {})
    pod_spec = dict(template["spec"])
    pod_spec["hostname"], pod_spec["subdomain"] = host, _domain(jobset)
    of_index = {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}}
    for key in ("containers", "initContainers"):
        if key in pod_spec:
            pod_spec[key] = [
                container
                | {
                    "env": [
                        *container.get("env", []),
                        {"name": "JOB_COMPLETION_INDEX", "valueFrom": of_index},
                    ]
                }
                for container in pod_spec[key]
            ]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": f"{host}-",
            "namespace": meta["namespace"],
            "labels": template.get("metadata", {}).get("labels", {}) | labels | {_INDEX: index},
            "annotations": annotations | {_INDEX: index, **labels},
            "ownerReferences": [_owner(jobset)],
        },
        "spec": pod_spec,
    }
    status, answer = cluster.create(pod)
    assert status == 201 or "being terminated" in str(answer), (host, spec, answer)


def _serve(cluster, jobset):
    name, namespace = _domain(jobset), jobset["metadata"]["namespace"]
    if cluster.get("Service", name, namespace=namespace) is None:
        selector = {f"{_PREFIX}/jobset-name": jobset["metadata"]["name"]}
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "namespace": namespace, "ownerReferences": [_owner(jobset)]},
            "spec": {"clusterIP": "None", "selector": selector, "publishNotReadyAddresses": True},
        }
        status, answer = cluster.create(service)
        assert status in (201, 409) or "being terminated" in str(answer), answer


def _after_failure(policy, failures, status):
    restarts, counted = status.get("restarts", 0), status.get("restartsCountTowardsMax", 0)
    action = "RestartJobSet"
    for rule in policy.get("rules", []):
        names, reasons = rule.get("targetReplicatedJobs"), rule.get("onJobFailureReasons")
        if any((not names or n in names) and (not reasons or r in reasons) for n, r in failures):
            action = rule["action"]
            break
    is_over = action == "RestartJobSet" and counted >= policy.get("maxRestarts", 0)
    if action == "FailJobSet" or is_over:
        reason = "FailJobSetFailurePolicyAction" if action == "FailJobSet" else "ReachedMaxRestarts"
        message = ", ".join(f"{name}: {reason}" for name, reason in failures)
        return {"terminalState": "Failed", "conditions": [_condition("Failed", reason, message)]}
    counted += action == "RestartJobSet"
    return {"restarts": restarts + 1, "restartsCountTowardsMax": counted}


def _has_failed(pod):
    return pod["status"].get("phase") == "Failed" or "deletionTimestamp" in pod["metadata"]


def _action(policy, pod):
    codes = [
        status["state"]["terminated"]["exitCode"]
        for status in pod["status"].get("containerStatuses", [])
        if "terminated" in status["state"]
    ]
    for rule in policy.get("rules", []):
        if on := rule.get("onExitCodes"):
            is_in = any(code in on["values"] for code in codes if code)
            is_out = any(code not in on["values"] for code in codes if code)
            if is_in if on["operator"] == "In" else is_out:
                return rule["action"]
        elif "deletionTimestamp" in pod["metadata"]:  # 1.20 sets no condition DisruptionTarget
            return rule["action"]
    return "Count"


def _is_ready(pod):
    conditions = (pod or {}).get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _domain(jobset):
    return jobset["spec"].get("network", {}).get("subdomain") or jobset["metadata"]["name"]


def _owner(jobset):
    meta = jobset["metadata"]
    of = {"apiVersion": jobset["apiVersion"], "kind": "JobSet", "name": meta["name"], "uid": meta["uid"]}
    return of | {"controller": True, "blockOwnerDeletion": True}


def _delete(cluster, pods):
    for pod in pods:
        if "deletionTimestamp" not in pod["metadata"]:
            meta = pod["metadata"]
            cluster.delete("Pod", meta["name"], namespace=meta["namespace"])


def _condition(kind, reason="ByTest", message="-"):
    at = "2026-11-23T00:00:00Z"
    return {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": at}


def _tell(cluster, jobset, change):
    before = jobset.get("status", {})
    if {key: before.get(key) for key in change} == change:
        return
    name, namespace = jobset["metadata"]["name"], jobset["metadata"]["namespace"]
    path = f"{cluster.path('JobSet', api=JOBSET, namespace=namespace, name=name)}/status"
    status, answer = cluster.ask("PATCH", path, {"status": change}, kind="application/merge-patch+json")
    assert status in (200, 404), answer
