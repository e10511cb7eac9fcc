"""Render a run for Kubernetes: its ConfigMap, network policy, networks, and a JobSet or a TrainJob."""

import json
from dataclasses import replace
from pathlib import PurePosixPath
from posixpath import normpath

from penstock.core.errors import UsageError
from penstock.core.network.settings import Setting
from penstock.launch.pods.pod import PodSpec
from penstock.launch.render.attach import attach
from penstock.launch.render.common_settings import settings_of_run
from penstock.launch.render.jobset import jobset, settings_of_jobset
from penstock.launch.render.pod_template import Object, labels_of, object_of, settings_of_pod
from penstock.launch.render.rendered import Rendered
from penstock.launch.render.trainjob import settings_of_trainjob, trainjob
from penstock.launch.spec import RunSpec

SPEC_FILE, RECIPE_FILE = "spec.json", "recipe.toml"


def render_kubernetes(spec: RunSpec) -> Rendered:
    """Return the objects of a run, in the order in which they are applied; the last one is the job.

    Raises:
        UsageError: the specification has no pods, a name does not fit, or nodes would not share a volume.
    """
    pod = pod_of(spec)
    check_volumes(spec)
    attachment = attach(
        spec.name,
        pod.namespace,
        pod.network_provider,
        pod.networks,
        labels=labels_of(spec.name),
        pods=spec.nodes.most,
        gpus=spec.processes if pod.device else 0,
    )
    settings = [*settings_of_run(spec), *settings_of_jobset(spec)]
    if pod.api == "trainjob":
        jobs: tuple[Object, ...] = trainjob(spec, pod, attachment)
        settings += settings_of_trainjob(spec)
    else:
        jobs = (jobset(spec, pod, attachment),)
    return Rendered(
        files={},
        commands=(),
        settings=(*settings, *settings_of_pod(pod, num_devices=spec.processes), _setting_of_policy(pod)),
        objects=(config_map(spec, pod), *network_policies(spec, pod), *attachment.objects, *jobs),
    )


def pod_of(spec: RunSpec) -> PodSpec:
    """Return the pods of a specification.

    Raises:
        UsageError: it has none.
    """
    if spec.pod is None:
        raise UsageError("The specification has no pods", fix="Give an image: --image NAME.")
    return spec.pod


def config_map(spec: RunSpec, pod: PodSpec) -> Object:
    """Return the ConfigMap with the specification and the recipe, which pods read."""
    bare = replace(spec, pod=replace(pod, recipe="", patch=""))
    data = {SPEC_FILE: json.dumps(bare.as_json(), indent=1) + "\n", RECIPE_FILE: pod.recipe}
    return object_of("v1", "ConfigMap", spec.name, pod.namespace, labels_of(spec.name), data=data)


POLICY_API, POLICY = "networking.k8s.io/v1", "NetworkPolicy"


def network_policies(spec: RunSpec, pod: PodSpec) -> tuple[Object, ...]:
    """Return the NetworkPolicy of a run's pods, if there is to be one.

    The ports at which ranks meet have no password: gloo and NCCL know none. So they are for pods of the same
    run. The policy is of the cluster's own network:
    Kubernetes knows no other.
    """
    if pod.network_policy == "none":
        return ()
    labels = labels_of(spec.name)
    rules: list[Object] = [{"from": [{"podSelector": {"matchLabels": labels}}]}]
    if pod.open_ports:
        rules.append({"ports": [{"protocol": "TCP", "port": port} for port in pod.open_ports]})
    policy = {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"], "ingress": rules}
    return (object_of(POLICY_API, POLICY, spec.name, pod.namespace, labels, spec=policy),)


def _setting_of_policy(pod: PodSpec) -> Setting:
    if pod.network_policy == "none":
        reason = "--network-policy none: anyone who reaches the ports of the ranks can disturb the run"
        return Setting("NetworkPolicy", "none", reason)
    opened = "".join(f", port {port} for all" for port in pod.open_ports)
    reason = "ports at which ranks meet have no password; needs a network plugin that enforces policies"
    return Setting("NetworkPolicy", f"pods of this run{opened}", reason)


def is_inside(path: str | PurePosixPath, mount: str | PurePosixPath) -> bool:
    """True if a path is in a mounted folder, once its `..` are resolved.

    >>> is_inside("/runs/a/../first", "/runs"), is_inside("/runs/../out", "/runs")
    (True, False)
    """
    return PurePosixPath(normpath(path)).is_relative_to(normpath(mount))


def check_volumes(spec: RunSpec) -> None:
    """Refuse volumes that only one node can mount, for a run on several, whose pods share the run's folder.

    Raises:
        UsageError: the message names the claim, or the folder that is in none.
    """
    if spec.nodes.most == 1:
        return
    volumes = pod_of(spec).volumes
    for volume in volumes:
        if not volume.is_shared:
            raise UsageError(
                f"Claim {volume.claim} is {volume.access_mode}, so one node can mount it, and the run has "
                f"up to {spec.nodes.most}",
                got=f"--volume {volume.claim}:{volume.path}",
                fix="Use a claim that is ReadWriteMany (NFS, CephFS, ...), or --nodes 1.",
            )
    if not any(is_inside(spec.run_dir, volume.path) for volume in volumes):
        raise UsageError(
            f"The run's folder is in no volume, and its pods, up to {spec.nodes.most}, share it: by it they "
            "see progress, stops and the end of the run",
            got=spec.run_dir,
            fix="Mount a claim that is ReadWriteMany: --volume CLAIM:PATH; or --nodes 1. Checkpoints may be "
            "in an object store.",
        )
