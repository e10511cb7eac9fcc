"""Quota of a queue of Kueue: a run for which it can never give enough is refused before it is submitted."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from penstock.core.errors import PenstockError, UsageError, nearest
from penstock.core.units import plural
from penstock.launch.engines.kubernetes_api import ClusterConnection, Object, UnknownKind
from penstock.launch.pods.patch import requests_of
from penstock.launch.render.kubernetes import pod_of
from penstock.launch.spec import RunSpec

_KUEUE = ("v1beta2", "v1beta1")


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
    own = {pod.device: str(spec.processes), "cpu": pod.cpu, "memory": pod.memory}
    wanted = {**requests_of(pod.patch), **{name: amount for name, amount in own.items() if amount}}
    for name, amount in wanted.items():
        if not name or (name not in quota.amounts and name != pod.device):
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


def quota_of(cluster: ClusterConnection, queue: str) -> QueueQuota | None:
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
