"""Cards of a pod by dynamic resource allocation: a ResourceClaimTemplate for the DRANET driver. Pure."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import ConfigError
from penstock.launch.pod_networks import DRANET, Attachment, Object, PodNetwork, declared
from penstock.launch.render.pod_template import object_of

_PCIE_ROOT = "resource.kubernetes.io/pcieRoot"


def by_dra(
    name: str, namespace: str, labels: Mapping[str, str], networks: Sequence[PodNetwork], *, gpus: int
) -> Attachment:
    """Return one claim for all cards, and for the GPUs that share a PCIe root with one."""
    beside = [network for network in networks if network.gpu_class]
    if beside and (gpus < 1 or gpus % len(beside)):
        raise ConfigError(
            f"{len(beside)} networks have a gpu_class, and each takes an equal share of the pod's GPUs",
            got=f"{gpus} GPUs",
            fix="Give as many networks a gpu_class as divide the processes of a node.",
        )
    requests: list[Object] = []
    constraints: list[Object] = []
    config: list[Object] = []
    for interface, network in zip(declared("dra", networks), networks, strict=True):
        if network.ipam != "whereabouts" or network.gateway or network.resource:
            raise ConfigError(
                "The provider dra hands cards over with the addresses and routes of the node",
                got=network.place,
                fix="Leave ipam, address, gateway and resource out; choose the card by master or attributes.",
            )
        requests.append(
            {
                "name": interface.name,
                "exactly": {
                    "deviceClassName": network.device_class,
                    "count": 1,
                    "selectors": [{"cel": {"expression": _selector(network)}}],
                },
            }
        )
        settings: dict[str, Any] = {"name": interface.name}
        if network.mtu:
            settings["mtu"] = network.mtu
        config.append(
            {
                "requests": [interface.name],
                "opaque": {"driver": DRANET, "parameters": {"interface": settings}},
            }
        )
        if network.gpu_class:
            share = f"gpus-{interface.name}"
            exactly = {"deviceClassName": network.gpu_class, "count": gpus // len(beside)}
            requests.append({"name": share, "exactly": exactly})
            constraints.append({"requests": [interface.name, share], "matchAttribute": _PCIE_ROOT})
    devices: dict[str, Any] = {"requests": requests, "config": config}
    if constraints:
        devices["constraints"] = constraints
    spec = {"spec": {"devices": devices}}
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
    own = f"{name}-networks-{digest[:8]}"  # a template is immutable, so other cards are another one
    template = object_of("resource.k8s.io/v1", "ResourceClaimTemplate", own, namespace, labels, spec=spec)
    return Attachment(
        objects=(template,),
        resource_claims=[{"name": "networks", "resourceClaimTemplateName": own}],
        container_claims=[{"name": "networks"}],
        holds_gpus=bool(beside),
    )


def _selector(network: PodNetwork) -> str:
    """Return a CEL expression that chooses a card by its name and attributes.

    Asking for an attribute that a device lacks is an error in CEL, hence `has`.

    >>> print(_selector(PodNetwork(master="ens1", attributes={"rdma": True})))
    device.driver == "dra.net" && has(device.attributes["dra.net"].ifName) && \
device.attributes["dra.net"].ifName == "ens1" && has(device.attributes["dra.net"].rdma) && \
device.attributes["dra.net"].rdma == true
    """
    wanted = {**({"ifName": network.master} if network.master else {}), **network.attributes}
    if not wanted:
        raise ConfigError(
            "A network for the provider dra chooses no card",
            fix='Give master = "ens1f0", or attributes = { rdma = true, numaNode = 0 }.',
        )
    parts = [f'device.driver == "{DRANET}"']
    for name, value in wanted.items():
        if not name.isidentifier():
            raise ConfigError("networks.attributes has a key that is no attribute of DRANET", got=name)
        attribute = f'device.attributes["{DRANET}"].{name}'
        parts += [f"has({attribute})", f"{attribute} == {json.dumps(value)}"]
    return " && ".join(parts)
