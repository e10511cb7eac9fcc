"""Pods of Kubernetes as its restricted pod security standard allows: one template for training and serving.

Nothing in it asks for a right: no privilege, no capability, no user id (OpenShift gives each namespace its
own), a read-only root, no token of the API. What a process writes is in volumes:

    /etc/penstock         the specification and the recipe, from a ConfigMap
    /etc/penstock-code    the archive of code that is laid over the image, from a ConfigMap
    /cache                parts of remote corpora, on the node's disk
    /dev/shm, /tmp        memory, and a scratch folder that is HOME, too
    claims                where --volume mounts them
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import UsageError
from penstock.core.network.settings import Setting
from penstock.core.units import parse_count
from penstock.launch.pod_networks import Attachment
from penstock.launch.pods.patch import merged, read_patch
from penstock.launch.pods.pod import PodSpec
from penstock.launch.spec import Secret

Object = dict[str, Any]  # Any: JSON
CONTAINER = "node"
"""Name of the container; Kubeflow Trainer expects this one."""
CONFIG = "/etc/penstock"
CODE = "/etc/penstock-code"
CODE_FILE = "code.tar.gz"
CACHE = "/cache"
_CACHE_SHARE = 0.9
"""Share of the cache's disk that is used: a pod that exceeds the limit is evicted."""

INSTANCE = "app.kubernetes.io/instance"
TRAINER, SERVER = "trainer", "server"
"""Components: a run and a server may have one name."""


def labels_of(name: str, component: str = TRAINER) -> dict[str, str]:
    """Return the labels of every object of a job, by which its pods are found."""
    return {
        "app.kubernetes.io/name": "penstock",
        INSTANCE: name,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/managed-by": "penstock",
    }


def object_of(
    api: str, kind: str, name: str, namespace: str, labels: Mapping[str, str], **parts: Any
) -> Object:  # Any: JSON
    """Return an object of Kubernetes.

    Args:
        api: `apiVersion`.
        parts: what it has besides its metadata, such as `spec`.
    """
    metadata = {"name": name, "namespace": namespace, "labels": dict(labels)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **parts}


def code_name(sha256: str) -> str:
    """Return the name of the ConfigMap of an archive of code."""
    return f"penstock-code-{sha256[:16]}"


def pod_template(
    name: str,
    pod: PodSpec,
    container: Mapping[str, Any],
    *,
    config: str,
    grace_s: float,
    attachment: Attachment,
    num_devices: int,
    environment: Sequence[tuple[str, str]],
    secrets: Sequence[Secret],
    restart: str,
    component: str = TRAINER,
) -> Object:
    """Return a pod template.

    Raises:
        UsageError: a secret is a variable of this shell, or the patch gives what an option has set.

    Args:
        container: what its container has besides: name, command, ports, probes.
        config: name of the ConfigMap that is mounted at /etc/penstock; empty: none.
        environment: variables of the run.
        restart: `Never` or `Always`.
        component: `TRAINER` or `SERVER`.
    """
    annotations = dict(attachment.annotations)
    for kind in ("required", "preferred"):
        if level := getattr(pod, f"{kind}_topology"):
            annotations[f"kueue.x-k8s.io/podset-{kind}-topology"] = level
    volumes, mounts = _volumes(pod, config)
    spec: Object = {
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": math.ceil(grace_s),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
            **_fs_group(pod),
        },
        "containers": [
            {
                "image": pod.image,
                **{key: _unexpanded(value) for key, value in container.items()},
                "env": _variables(pod, environment, secrets),
                "resources": _resources(pod, attachment, num_devices),
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": mounts,
                "terminationMessagePolicy": "FallbackToLogsOnError",
            }
        ],
        "volumes": volumes,
    }
    for key, value in (
        ("serviceAccountName", pod.service_account),
        ("priorityClassName", pod.priority_class),
        ("nodeSelector", dict(pod.node_selector)),
        ("resourceClaims", list(attachment.resource_claims)),
    ):
        if value:
            spec[key] = value
    if pod.excluded_nodes:  # by the name of the node: its label hostname may be another
        fields = [
            {"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in pod.excluded_nodes
        ]
        required = {"nodeSelectorTerms": [{"matchFields": fields}]}
        spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    if pod.device and num_devices:  # nodes with devices are kept free of others by this taint
        spec["tolerations"] = [{"key": pod.device, "operator": "Exists", "effect": "NoSchedule"}]
    metadata: Object = {"labels": labels_of(name, component)}
    if annotations:
        metadata["annotations"] = annotations
    return merged({"metadata": metadata, "spec": spec}, pod.patch)


def escaped(text: str) -> str:
    """Return a text of which the kubelet, which replaces $(NAME) and $$, makes the given one.

    >>> escaped("$(HOME) $$")
    '$$(HOME) $$$$'
    """
    return text.replace("$", "$$")


def _unexpanded(value: Any) -> Any:  # Any: JSON
    """Return a field of a container; its lists of words, such as `command`, are escaped."""
    return (
        [escaped(one) if isinstance(one, str) else one for one in value] if isinstance(value, list) else value
    )


def _fs_group(pod: PodSpec) -> Object:
    if pod.fs_group is None:
        return {}
    return {"fsGroup": pod.fs_group, "fsGroupChangePolicy": "OnRootMismatch"}


def _variables(
    pod: PodSpec, environment: Sequence[tuple[str, str]], secrets: Sequence[Secret]
) -> list[Object]:
    values = {
        "HOME": "/tmp",
        "USER": "penstock",
        "PENSTOCK_CACHE": CACHE,
        "PENSTOCK_CACHE_BYTES": str(int(_CACHE_SHARE * parse_count(pod.cache))),
        **dict(environment),
    }
    found: list[Object] = [{"name": name, "value": escaped(value)} for name, value in values.items()]
    for secret in secrets:
        kind, _, where = secret.source.partition(":")
        if kind == "env":
            raise UsageError(
                "A variable of this shell cannot be handed to pods: an object would hold its value",
                got=f"{secret.name}={secret.source}",
                fix=f"kubectl create secret generic NAME --from-literal=KEY=...; then --secret "
                f"{secret.name}=key:NAME/KEY.",
            )
        if kind == "key":
            of, _, key = where.partition("/")
            found.append({"name": secret.name, "valueFrom": {"secretKeyRef": {"name": of, "key": key}}})
    return found


def _resources(pod: PodSpec, attachment: Attachment, num_devices: int) -> Object:
    amounts = dict(attachment.resources)
    if pod.device and not attachment.holds_gpus:
        amounts[pod.device] = str(num_devices)
    amounts |= {name: amount for name, amount in (("cpu", pod.cpu), ("memory", pod.memory)) if amount}
    found: Object = {"requests": amounts, "limits": amounts} if amounts else {}
    if attachment.container_claims:
        found["claims"] = list(attachment.container_claims)
    return found


def _volumes(pod: PodSpec, config: str) -> tuple[list[Object], list[Object]]:
    volumes: list[Object] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "cache", "emptyDir": {"sizeLimit": pod.cache}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": pod.shared_memory}},
    ]
    mounts: list[Object] = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "cache", "mountPath": CACHE},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    if config:
        volumes.append({"name": "config", "configMap": {"name": config}})
        mounts.append({"name": "config", "mountPath": CONFIG, "readOnly": True})
    if pod.code and not pod.code.address:
        volumes.append({"name": "code", "configMap": {"name": code_name(pod.code.sha256)}})
        mounts.append({"name": "code", "mountPath": CODE, "readOnly": True})
    for index, volume in enumerate(pod.volumes):
        volumes.append({"name": f"claim-{index}", "persistentVolumeClaim": {"claimName": volume.claim}})
        mounts.append({"name": f"claim-{index}", "mountPath": volume.path})
    return volumes, mounts


def settings_of_pod(pod: PodSpec, *, num_devices: int) -> list[Setting]:
    """Return the settings of every pod, each with its reason."""
    found = [
        Setting("image", pod.image, "--image"),
        Setting("runAsNonRoot", "true", "any user id but root; OpenShift chooses one"),
        Setting(
            "readOnlyRootFilesystem", "true", "restricted pod security; /tmp, /cache and claims are written"
        ),
        Setting("automountServiceAccountToken", "false", "training asks nothing of the cluster"),
        Setting(
            "PENSTOCK_CACHE",
            CACHE,
            f"parts of remote corpora stay on the node's disk, at most 90% of {pod.cache}",
        ),
        Setting("/dev/shm", pod.shared_memory, "gloo and NCCL exchange data in it"),
    ]
    if pod.device:
        found.append(Setting(pod.device, str(num_devices), "one for each process"))
    for kind in ("required", "preferred"):
        if level := getattr(pod, f"{kind}_topology"):
            name = f"kueue.x-k8s.io/podset-{kind}-topology"
            found.append(Setting(name, level, "pods that are near exchange data faster"))
    found += [Setting(volume.path, f"claim {volume.claim}", "--volume") for volume in pod.volumes]
    if pod.code:
        reason = "laid over the image; pods check its hash"
        found.append(Setting("code", pod.code.address or code_name(pod.code.sha256), reason))
    for part, fields in read_patch(pod.patch).items():
        found += [
            Setting(f"{part}.{name}", json.dumps(value), "--pod-patch") for name, value in fields.items()
        ]
    if pod.networks:
        reason = "each pod checks that it has them, and derives NCCL's and gloo's variables there"
        shown = ",".join(network.place for network in pod.networks)
        found.append(Setting(f"networks ({pod.network_provider})", shown, reason))
    return found
