"""Condition of a Kubernetes node, set from the doctor's findings through the API.

All that it needs is the right to *patch* `nodes/status`. It reads its node by an empty patch, which changes
nothing and is answered with the object; so the time of the last transition survives a restart of the daemon.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.core.env import ClusterApi
from penstock.core.pod_https import Credentials, send
from penstock.doctor.checks.check import Finding, Level

TYPE = "PenstockUnhealthy"
"""Type of the condition; as with MemoryPressure, "False" is good."""
CREDENTIALS = Credentials(
    ca_file=Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"),
    token_file=Path("/var/run/secrets/kubernetes.io/serviceaccount/token"),
)
"""Files that Kubernetes mounts into a pod for its service account."""
_MOST_CHARACTERS = 1024
_MERGE = "application/strategic-merge-patch+json"  # merges conditions by type

Condition = dict[str, str]


def condition_of(
    findings: Sequence[Finding] | None, before: Mapping[str, str] | None, *, now: str
) -> Condition:
    """Return the condition for some findings.

    Args:
        findings: of the last check; None: it could not run.
        before: the condition that the node has; None: it has none.
        now: time, RFC 3339.

    >>> condition_of([], None, now="2026-11-23T10:00:00Z")["status"]
    'False'
    """
    if findings is None:
        status, reason, message = "Unknown", "ChecksDidNotRun", "The checks could not run; see the pod's log"
    elif red := [finding for finding in findings if finding.level is Level.RED]:
        status, reason = "True", "ChecksFailed"
        message = "; ".join(f"{finding.check}: {finding.what}" for finding in red)
    else:
        status, reason, message = "False", "ChecksPassed", "No check found anything red"
    changed = before is None or before.get("status") != status
    return {
        "type": TYPE,
        "status": status,
        "reason": reason,
        "message": message[:_MOST_CHARACTERS],
        "lastHeartbeatTime": now,
        "lastTransitionTime": now if changed or before is None else before.get("lastTransitionTime") or now,
    }


def set_condition(
    api: ClusterApi,
    findings: Sequence[Finding] | None,
    *,
    now: str,
    credentials: Credentials = CREDENTIALS,
) -> Condition:
    """Set the condition of the node; return it.

    Raises:
        Refused: the API server did not do it.
        OSError: it cannot be reached, or a file of the pod cannot be read.
        http.client.HTTPException: its answer is not HTTP.
        ValueError: its answer is not JSON.
    """
    node = _patch(api, {}, credentials)
    conditions = node.get("status", {}).get("conditions", [])
    before = next((found for found in conditions if found.get("type") == TYPE), None)
    condition = condition_of(findings, before, now=now)
    _patch(api, {"status": {"conditions": [condition]}}, credentials)
    return condition


def _patch(api: ClusterApi, change: dict[str, Any], credentials: Credentials) -> dict[str, Any]:  # Any: JSON
    url = f"{api.url}/api/v1/nodes/{api.node}/status"
    answer = json.loads(send("PATCH", url, json.dumps(change).encode(), credentials, content_type=_MERGE))
    if not isinstance(answer, dict):
        raise ValueError("the API server's answer is no object")
    return answer
