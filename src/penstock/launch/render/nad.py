"""Cards of a pod by Multus: a NetworkAttachmentDefinition for each, from the standard CNI plugins. Pure."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import ConfigError
from penstock.launch.pod_networks import ANNOTATION, Attachment, Object, PodNetwork, declared, network_of
from penstock.launch.render.pod_template import object_of

_API = "k8s.cni.cncf.io/v1"
_RESOURCE_OF_NAD = "k8s.v1.cni.cncf.io/resourceName"
_CNI_VERSION = "0.4.0"
"""Oldest version with CHECK, which Multus, whereabouts and the SR-IOV plugin all accept."""


def by_nad(
    name: str, namespace: str, labels: Mapping[str, str], networks: Sequence[PodNetwork]
) -> Attachment:
    """Return one NetworkAttachmentDefinition per card, and the annotation by which Multus attaches it."""
    _check(networks)
    objects, entries = [], []
    for interface, network in zip(declared("nad", networks), networks, strict=True):
        own = f"{name}-{interface.name}"
        spec = {"config": json.dumps(cni_config(own, network))}
        made = object_of(_API, "NetworkAttachmentDefinition", own, namespace, labels, spec=spec)
        if network.resource:
            made["metadata"]["annotations"] = {_RESOURCE_OF_NAD: network.resource}
        objects.append(made)
        entries.append({"name": own, "namespace": namespace, "interface": interface.name})
    taken = Counter(network.resource for network in networks if network.resource)
    return Attachment(
        objects=tuple(objects),
        annotations={ANNOTATION: json.dumps(entries)},
        resources={resource: str(count) for resource, count in taken.items()},
    )


def cni_config(name: str, network: PodNetwork) -> Object:
    """Return the plugins of one card in their order, as a CNI network configuration list.

    The card's own plugin gives the address; `tuning` sets the MTU and kernel settings; `sbr` sends what comes
    from the card's address to the card's gateway. Without a gateway all peers are neighbours, whom the card's
    own route reaches, and `sbr` would do harm: up to CNI plugins 1.9 it takes that route from the main table.
    gloo and NCCL bind no source address, so they would connect by eth0, or not at all (with `addSourceHints`
    the route stays: github.com/containernetworking/plugins, pull request 1217).
    """
    main: dict[str, Any] = {"type": network.type}
    if network.type == "host-device":
        main |= {"device": network.master} if network.master else {}
    elif network.type != "sriov":
        main |= {"master": network.master, "mode": "bridge" if network.type == "macvlan" else "l2"}
    tuning: dict[str, Any] = {"type": "tuning", "sysctl": network.sysctls}
    if network.mtu:
        tuning["mtu"] = network.mtu
    plugins = [{**main, "ipam": _ipam(network)}, *([tuning] if network.mtu or network.sysctls else [])]
    if network.gateway:
        plugins.append({"type": "sbr", "addSourceHints": True})
    return {"cniVersion": _CNI_VERSION, "name": name, "plugins": plugins}


def _ipam(network: PodNetwork) -> Object:
    gateway = {"gateway": network.gateway} if network.gateway else {}
    if network.ipam == "static":
        return {"type": "static", "addresses": [{"address": network.address, **gateway}]}
    if network.ipam == "host-local":
        return {"type": "host-local", "ranges": [[{"subnet": network.subnet, **gateway}]]}
    return {"type": "whereabouts", "range": network.subnet, **gateway}


def _check_source(network: PodNetwork) -> None:
    """Refuse a network whose card its plugin could not find."""
    takes_resource = network.type in ("host-device", "sriov")
    if network.type == "sriov" and not network.resource:
        raise ConfigError(
            'A network of type "sriov" needs the resource of its virtual functions',
            got=network.master,
            fix='Example: resource = "openshift.io/mlxnics".',
        )
    if bool(network.master) == bool(network.resource) or (network.resource and not takes_resource):
        raise ConfigError(
            f'A network of type "{network.type}" needs a master'
            f"{', or the resource of a device plugin' if takes_resource else ', and takes no resource'}",
            got=f"master = {network.master!r}, resource = {network.resource!r}",
            fix='Example: master = "ens1f0".',
        )


def _check(networks: Sequence[PodNetwork]) -> None:
    """Refuse cards that their plugins could not find, and networks that overlap."""
    for network in networks:
        _check_source(network)
    nets = [network_of(network.subnet) for network in networks]
    for index, one in enumerate(nets):
        for other in nets[index + 1 :]:
            if one.version == other.version and one.overlaps(other):
                raise ConfigError(
                    "Two networks of a pod overlap, so one card would carry the traffic of both",
                    got=f"{one} and {other}",
                    fix="Give each card a subnet of its own.",
                )
