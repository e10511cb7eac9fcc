"""Render a server: a Deployment, a Service and an autoscaler, or an InferenceService of KServe.

A pod gets requests once `/ready` answers. When it stops, proxies still send to it for a moment, so it waits
before the signal; then running answers end within the drain, which is shorter than the grace.
"""

import math
import re
from collections.abc import Mapping

from penstock.core.errors import UsageError
from penstock.core.network.settings import Setting
from penstock.launch.render.attach import attach
from penstock.launch.render.pod_template import (
    SERVER,
    Object,
    labels_of,
    object_of,
    pod_template,
    settings_of_pod,
)
from penstock.launch.render.rendered import Rendered
from penstock.launch.serving import LEAVE_S, ServingSpec

_KSERVE_CONTAINER = "kserve-container"
_LONGEST_NAME = 50
_POLL_S = 5


def render_serving(spec: ServingSpec) -> Rendered:
    """Return the objects of a server.

    Raises:
        UsageError: its name does not fit, or a secret is none of Kubernetes.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", spec.name) or len(spec.name) > _LONGEST_NAME:
        raise UsageError(
            f"The name of a server has at most {_LONGEST_NAME} lower-case letters, digits and -, and begins "
            "with a letter",
            got=spec.name,
            fix="Give another one by --name.",
        )
    for secret in spec.secrets:
        if secret.source.startswith("file:"):
            raise UsageError(
                "A server reads no secret from a file: nothing would set the variable",
                got=f"--secret {secret.name}={secret.source}",
                fix=f"kubectl create secret generic NAME --from-file=KEY=PATH; then --secret {secret.name}="
                "key:NAME/KEY.",
            )
    command = (spec.python, "-m", "penstock", "serve", spec.model)
    arguments = (
        "--host",
        "0.0.0.0",
        "--port",
        str(spec.port),
        "--drain-s",
        f"{spec.drain_s:g}",
        *spec.options,
    )
    attachment = attach(
        spec.name,
        spec.pod.namespace,
        spec.pod.network_provider,
        spec.pod.networks,
        labels=labels_of(spec.name, SERVER),
        pods=spec.replicas.most,
        gpus=spec.devices if spec.pod.device else 0,
    )
    ready = {"httpGet": {"path": "/ready", "port": "http"}}
    container: Object = {
        "name": _KSERVE_CONTAINER if spec.is_kserve else SERVER,
        "command": list(command),
        "args": list(arguments),
        "ports": [{"name": "http", "containerPort": spec.port, "protocol": "TCP"}],
        "startupProbe": {
            **ready,
            "periodSeconds": _POLL_S,
            "failureThreshold": math.ceil(spec.startup_s / _POLL_S),
        },
        "readinessProbe": {**ready, "periodSeconds": 2, "failureThreshold": 1},
        "livenessProbe": {
            "httpGet": {"path": "/health", "port": "http"},
            "periodSeconds": 10,
            "failureThreshold": 3,
        },
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", f"{LEAVE_S:g}"]}}},
    }
    template = pod_template(
        spec.name,
        spec.pod,
        container,
        config="",
        grace_s=spec.grace_s,
        attachment=attachment,
        num_devices=spec.devices,
        environment=spec.environment,
        secrets=spec.secrets,
        restart="Always",
        component=SERVER,
    )
    objects = [_inference_service(spec, template)] if spec.is_kserve else _deployment(spec, template)
    if spec.replicas.is_elastic:
        deployment = f"{spec.name}-predictor" if spec.is_kserve else spec.name  # KServe makes it
        objects.append(_autoscaler(spec, deployment))
    return Rendered(
        files={},
        commands=(),
        settings=(*_settings(spec), *settings_of_pod(spec.pod, num_devices=spec.devices)),
        objects=(*attachment.objects, *objects),
    )


def _deployment(spec: ServingSpec, template: Object) -> list[Object]:
    name, namespace, labels = spec.name, spec.pod.namespace, labels_of(spec.name, SERVER)
    deployment: Object = {
        "selector": {"matchLabels": labels},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": template,
    }
    if not spec.replicas.is_elastic:  # else the autoscaler's number would be set back
        deployment["replicas"] = spec.replicas.least
    ports = [{"name": "http", "port": spec.port, "protocol": "TCP", "targetPort": "http"}]
    return [
        object_of("v1", "Service", name, namespace, labels, spec={"selector": labels, "ports": ports}),
        object_of("apps/v1", "Deployment", name, namespace, labels, spec=deployment),
    ]


def _autoscaler(spec: ServingSpec, deployment: str) -> Object:
    """Return the autoscaler of a Deployment, by the answers that wait."""
    target = {"type": "AverageValue", "averageValue": str(spec.waiting_per_pod)}
    return object_of(
        "autoscaling/v2",
        "HorizontalPodAutoscaler",
        spec.name,
        spec.pod.namespace,
        labels_of(spec.name, SERVER),
        spec={
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment},
            "minReplicas": spec.replicas.least,
            "maxReplicas": spec.replicas.most,
            "metrics": [
                {"type": "Pods", "pods": {"metric": {"name": "penstock_answers_waiting"}, "target": target}}
            ],
        },
    )


def _inference_service(spec: ServingSpec, template: Object) -> Object:
    pods = {key: value for key, value in template["spec"].items() if key != "restartPolicy"}
    annotations = {"serving.kserve.io/deploymentMode": "RawDeployment"}
    if spec.replicas.is_elastic:  # else KServe scales by the CPU, which says nothing of a server of models
        annotations["serving.kserve.io/autoscalerClass"] = "external"
    labels = labels_of(spec.name, SERVER)
    predictor = {
        "minReplicas": spec.replicas.least,
        "maxReplicas": spec.replicas.most,
        **_beyond(template["metadata"], labels),
        **pods,
    }
    api, body = "serving.kserve.io/v1beta1", {"predictor": predictor}
    made = object_of(api, "InferenceService", spec.name, spec.pod.namespace, labels, spec=body)
    made["metadata"]["annotations"] = annotations
    return made


def _beyond(metadata: Object, own: Mapping[str, str]) -> Object:
    """Return annotations and labels of pods without those that KServe takes from the InferenceService."""
    labels = {name: value for name, value in metadata["labels"].items() if name not in own}
    found = {"annotations": metadata.get("annotations"), "labels": labels}
    return {key: values for key, values in found.items() if values}


def _settings(spec: ServingSpec) -> list[Setting]:
    found = [
        Setting("replicas", str(spec.replicas), "--nodes"),
        Setting(
            "terminationGracePeriodSeconds",
            str(math.ceil(spec.grace_s)),
            f"{LEAVE_S:g} s until proxies know, {spec.drain_s:g} s for open answers, then the exit",
        ),
        Setting("--drain-s", f"{spec.drain_s:g}", "shorter than the grace"),
        Setting(
            "startupProbe",
            f"/ready within {spec.startup_s:g} s",
            "a model takes minutes to load, in which no other probe counts",
        ),
        Setting("readinessProbe", "/ready", "503 while it drains: no new requests"),
        Setting("livenessProbe", "/health", "503 once the engine has failed: start again"),
    ]
    if spec.replicas.is_elastic:
        found.append(
            Setting(
                "HorizontalPodAutoscaler",
                f"penstock_answers_waiting, {spec.waiting_per_pod} a pod",
                "needs a metrics adapter, such as prometheus-adapter",
            )
        )
    return found
