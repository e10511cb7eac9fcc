"""Cards of a pod by multi-nic-cni: one MultiNicNetwork over all of them. Pure."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import ConfigError
from penstock.launch.pod_networks import ANNOTATION, Attachment, Object, PodNetwork, network_of

_HOST_BITS = 8
"""Bits of a MultiNicNetwork's subnet that number the nodes, as in the samples of multi-nic-cni."""


def by_multi_nic_cni(
    name: str, namespace: str, labels: Mapping[str, str], networks: Sequence[PodNetwork]
) -> Attachment:
    """Return one MultiNicNetwork over all cards. It belongs to the cluster, not to a namespace."""
    _check_alike(networks)
    first = networks[0]
    plugin: dict[str, Any] = {"cniVersion": "0.3.0", "type": first.type, "args": {"mode": "l3"}}
    interface_bits = (len(networks) - 1).bit_length()
    ipam: Object = {
        "type": "multi-nic-ipam",
        "hostBlock": _HOST_BITS,
        "interfaceBlock": interface_bits,
        "vlanMode": "l3",
    }
    if first.type == "macvlan":
        plugin["args"], ipam = {"mode": "bridge"}, {"type": "whereabouts"}
    elif (free := network_of(first.subnet).prefixlen + _HOST_BITS + interface_bits) > 30:
        raise ConfigError(
            f"The subnet is too small: {_HOST_BITS} bits number the nodes and {interface_bits} the cards, "
            f"which leaves {max(0, 32 - free)} for a node's pods",
            got=first.subnet,
            fix="Give a larger one, such as a /16.",
        )
    if first.mtu:
        plugin["args"]["mtu"] = str(first.mtu)
    digest = hashlib.sha256(f"{namespace}/{name}".encode()).hexdigest()  # a-b of c is not a of b-c
    own = f"{namespace}-{name}-{digest[:8]}"
    spec: dict[str, Any] = {
        "subnet": first.subnet,
        "ipam": json.dumps(ipam),
        "multiNICIPAM": first.type == "ipvlan",
        "plugin": plugin,
        "attachPolicy": {"strategy": "none"},
        "namespaces": [namespace],
    }
    if masters := [network.master for network in networks if network.master]:
        spec["masterNets"] = masters
    network = {
        "apiVersion": "multinic.fms.io/v1",
        "kind": "MultiNicNetwork",
        "metadata": {"name": own, "labels": dict(labels)},
        "spec": spec,
    }
    return Attachment(objects=(network,), annotations={ANNOTATION: own})


def _check_alike(networks: Sequence[PodNetwork]) -> None:
    """Refuse networks that one MultiNicNetwork cannot describe."""
    first = networks[0]
    for network in networks:
        if network.type not in ("macvlan", "ipvlan") or network.resource:
            raise ConfigError(
                "The provider multi-nic-cni shares cards by macvlan or ipvlan",
                got=network.type,
                fix="Choose one of these types, or the provider nad.",
            )
        if (network.type, network.mtu, network.subnet) != (first.type, first.mtu, first.subnet):
            raise ConfigError(
                "One MultiNicNetwork has one type, MTU and subnet for all cards, and these differ",
                got=network.place,
                fix="Make them equal, with one large subnet such as 10.10.0.0/16, or use the provider nad.",
            )
        if network.master:
            network_of(network.master, key="master")
