"""Network cards of a pod beside its cluster's own network: what a provider needs to put them there. Pure.

    [[networks]]
    master = "ens1f0"          # card of the node
    type = "macvlan"
    mtu = 9000
    subnet = "10.10.1.0/24"

A pod has one interface, eth0, of the cluster's own network, which is often the slowest of its node. Three
providers add the others:

    nad            Multus: a NetworkAttachmentDefinition per card, from the standard CNI plugins
    dra            dynamic resource allocation: a ResourceClaimTemplate for the DRANET driver
    multi-nic-cni  one MultiNicNetwork over all cards

Each gives the interfaces names that are known beforehand, so that a pod can tell whether it has them
(pod_check.py).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any, Literal

from penstock.core.errors import ConfigError, nearest

NetworkType = Literal["macvlan", "ipvlan", "host-device", "sriov"]
Ipam = Literal["whereabouts", "host-local", "static"]

ANNOTATION = "k8s.v1.cni.cncf.io/networks"
_RESOURCE_OF_NAD = "k8s.v1.cni.cncf.io/resourceName"
_CNI_VERSION = "0.4.0"
"""Oldest version with CHECK, which Multus, whereabouts and the SR-IOV plugin all accept."""
_LEAST_MTU, _MOST_MTU = 1280, 65_535
_PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
_DRANET = "dra.net"
_OWN_ADDRESSES_ONLY = {
    "net.ipv4.conf.IFNAME.arp_ignore": "1",
    "net.ipv4.conf.IFNAME.arp_announce": "2",
}
_HOST_BITS = 8
"""Bits of a MultiNicNetwork's subnet that number the nodes, as in the samples of multi-nic-cni."""

Object = Mapping[str, Any]  # Any: what JSON holds


@dataclass(frozen=True, slots=True, kw_only=True)
class PodNetwork:
    """Network card that every pod of a run gets."""

    master: str = ""
    """Interface of the node, such as "ens1f0"; for multi-nic-cni the network of the nodes' cards, such as
    "10.0.1.0/24"."""
    resource: str = ""
    """Resource of a device plugin, such as "openshift.io/mlxnics", that holds cards or SR-IOV functions."""
    type: NetworkType = "macvlan"
    """CNI plugin. `host-device` and `sriov` hand over a whole card or virtual function; `macvlan` and
    `ipvlan` share a card among pods. Without meaning for `dra`, which hands the card over."""
    mtu: int = 0
    """Largest packet in bytes; 0: the card's own."""
    subnet: str = ""
    """Network of the addresses, such as "10.10.1.0/24". For `dra` the card keeps its address, and the
    subnet is only checked."""
    gateway: str = ""
    """Router to other networks, for this card's traffic only; empty: none."""
    ipam: Ipam = "whereabouts"
    """How addresses are chosen: `whereabouts` for the whole cluster; `host-local` by each node for itself,
    and `static`, are for runs of one pod."""
    address: str = ""
    """Address with prefix length for `static`, such as "10.10.1.7/24"."""
    sysctls: dict[str, str] = field(default_factory=lambda: dict(_OWN_ADDRESSES_ONLY))
    """Kernel settings of the interface, IFNAME for its name. By default it answers ARP for its own addresses
    only: with several cards in one switch, all traffic to a pod may otherwise come in by one. On OpenShift
    the cluster's cni-sysctl-allowlist must have them; or give `{}` where each card has a VLAN of its own."""
    device_class: str = _DRANET
    """DeviceClass of the card, for `dra`."""
    attributes: dict[str, str | int | bool] = field(default_factory=dict)
    """Attributes that DRANET publishes of the card, such as `rdma = true`, for `dra`."""
    gpu_class: str = ""
    """DeviceClass of GPUs, such as "gpu.nvidia.com", for `dra`: an equal share of the pod's GPUs is claimed
    on the same PCIe root as this card; empty: cards and GPUs are claimed apart."""

    def __post_init__(self) -> None:
        if self.mtu and not _LEAST_MTU <= self.mtu <= _MOST_MTU:
            raise ConfigError(
                f"networks.mtu must be from {_LEAST_MTU} to {_MOST_MTU}",
                got=self.mtu,
                fix="Give the MTU of the card and of every switch, 1500 or 9000, or leave it out.",
            )
        network = _network(self.subnet) if self.subnet else None
        for key, text in (("gateway", self.gateway), ("address", self.address.partition("/")[0])):
            if text and (network is None or not _is_inside(text, network)):
                raise ConfigError(
                    f"networks.{key} must be an address of the subnet {self.subnet or '(none is given)'}",
                    got=text,
                )
        if (self.ipam == "static") != bool(self.address):
            raise ConfigError(
                "networks.address is for ipam = 'static', which needs it",
                got=self.address,
                fix='Example: ipam = "static", address = "10.10.1.7/24".',
            )

    @property
    def place(self) -> str:
        """Where the card is from, for messages."""
        return self.master or self.resource or ", ".join(f"{k} = {v}" for k, v in self.attributes.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class PodNetworks:
    """File of --networks."""

    provider: str = "nad"
    """`nad`, `dra` or `multi-nic-cni`."""
    networks: tuple[PodNetwork, ...] = ()
    """Cards of every pod."""

    def __post_init__(self) -> None:
        _check_provider(self.provider)
        if not self.networks:
            raise ConfigError(
                "The file of networks has no [[networks]]",
                fix="Add one for each card; docs/how-to/networks-of-pods.md has examples.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredInterface:
    """Interface that a pod must have once its networks are attached."""

    name: str
    mtu: int = 0
    """0: any."""
    subnet: str = ""
    """Empty: any."""

    def __str__(self) -> str:
        parts = [f"in {self.subnet}"] if self.subnet else []
        parts += [f"MTU {self.mtu}"] if self.mtu else []
        return f"{self.name} ({', '.join(parts)})" if parts else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """Objects and pod fields that a provider adds to a job to give its pods their cards."""

    objects: tuple[Object, ...] = ()
    """Objects that must exist before the pods."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Annotations of the pod template."""
    resource_claims: Sequence[Object] = ()
    """`resourceClaims` of the pod's specification."""
    container_claims: Sequence[Object] = ()
    """`resources.claims` of the container."""
    resources: Mapping[str, str] = field(default_factory=dict)
    """Requests and limits of the container."""
    holds_gpus: bool = False
    """True if the claims contain the pod's GPUs: the container must then not request them again."""


def attach(
    name: str,
    namespace: str,
    provider: str,
    networks: Sequence[PodNetwork],
    *,
    labels: Mapping[str, str],
    pods: int = 1,
    gpus: int = 0,
) -> Attachment:
    """Return what a job's pods need for their cards.

    Args:
        name: of the job; names of objects begin with it.
        labels: of the objects, by which a later job of this name knows them for its own.
        pods: most pods of the job at a time.
        gpus: GPUs of each pod.

    Raises:
        ConfigError: the provider cannot give these networks.
    """
    _check_provider(provider)
    if not networks:
        return Attachment()
    _check_apart(networks)
    if provider == "dra":
        return _by_dra(name, namespace, labels, networks, gpus=gpus)
    _check_cni(networks, provider, pods=pods)
    if provider == "multi-nic-cni":
        return _by_multi_nic_cni(name, namespace, labels, networks)
    return _by_nad(name, namespace, labels, networks)


def declared(provider: str, networks: Sequence[PodNetwork]) -> tuple[DeclaredInterface, ...]:
    """Return the interfaces that a pod has once its networks are attached, in their order.

    >>> cards = [PodNetwork(master="ens1", subnet="10.1.0.0/24"), PodNetwork(master="ens2", mtu=9000)]
    >>> [str(interface) for interface in declared("nad", cards)]
    ['net1 (in 10.1.0.0/24)', 'net2 (MTU 9000)']
    >>> [interface.name for interface in declared("multi-nic-cni", cards)]
    ['net1-0', 'net1-1']
    """
    names = (
        [f"net1-{index}" for index in range(len(networks))]
        if provider == "multi-nic-cni"
        else [f"net{number}" for number in range(1, len(networks) + 1)]
    )
    return tuple(
        DeclaredInterface(name=name, mtu=network.mtu, subnet=network.subnet)
        for name, network in zip(names, networks, strict=True)
    )


def _by_nad(
    name: str, namespace: str, labels: Mapping[str, str], networks: Sequence[PodNetwork]
) -> Attachment:
    """Return one NetworkAttachmentDefinition per card, and the annotation by which Multus attaches it."""
    objects, entries = [], []
    for interface, network in zip(declared("nad", networks), networks, strict=True):
        own = f"{name}-{interface.name}"
        metadata: dict[str, Any] = {"name": own, "namespace": namespace, "labels": dict(labels)}
        if network.resource:
            metadata["annotations"] = {_RESOURCE_OF_NAD: network.resource}
        objects.append(
            {
                "apiVersion": "k8s.cni.cncf.io/v1",
                "kind": "NetworkAttachmentDefinition",
                "metadata": metadata,
                "spec": {"config": json.dumps(cni_config(own, network))},
            }
        )
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


def _by_dra(
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
                "opaque": {"driver": _DRANET, "parameters": {"interface": settings}},
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
    template = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": own, "namespace": namespace, "labels": dict(labels)},
        "spec": spec,
    }
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
    parts = [f'device.driver == "{_DRANET}"']
    for name, value in wanted.items():
        if not name.isidentifier():
            raise ConfigError("networks.attributes has a key that is no attribute of DRANET", got=name)
        attribute = f'device.attributes["{_DRANET}"].{name}'
        parts += [f"has({attribute})", f"{attribute} == {json.dumps(value)}"]
    return " && ".join(parts)


def _by_multi_nic_cni(
    name: str, namespace: str, labels: Mapping[str, str], networks: Sequence[PodNetwork]
) -> Attachment:
    """Return one MultiNicNetwork over all cards. It belongs to the cluster, not to a namespace."""
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
    elif (free := _network(first.subnet).prefixlen + _HOST_BITS + interface_bits) > 30:
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


def _check_provider(provider: str) -> None:
    if provider not in PROVIDERS:
        raise ConfigError("Unknown network provider", got=provider, fix=nearest(provider, list(PROVIDERS)))


def _check_apart(networks: Sequence[PodNetwork]) -> None:
    """Refuse the same card twice."""
    seen = Counter(network.master for network in networks if network.master)
    for master, count in seen.items():
        if count > 1:
            raise ConfigError(f"{count} networks have the same master", got=master, fix="One for each card.")


def _check_cni(networks: Sequence[PodNetwork], provider: str, *, pods: int) -> None:
    """Refuse networks that the CNI plugins could not attach, or that would not reach each other."""
    for network in networks:
        if network.attributes or network.gpu_class:
            raise ConfigError(
                "networks.attributes and networks.gpu_class are for the provider dra", got=provider
            )
        if not network.subnet:
            raise ConfigError(
                "A network has no subnet",
                got=network.place,
                fix='Give one of its own, such as subnet = "10.10.1.0/24".',
            )
        if network.ipam != "whereabouts" and pods > 1:
            raise ConfigError(
                f"The run has up to {pods} pods, which would get the same addresses from ipam = "
                f"{network.ipam!r}",
                got=network.place,
                fix='Use ipam = "whereabouts", which numbers the pods of the whole cluster.',
            )
    if provider == "multi-nic-cni":
        _check_alike(networks)
        return
    for network in networks:
        _check_source(network)
    nets = [_network(network.subnet) for network in networks]
    for index, one in enumerate(nets):
        for other in nets[index + 1 :]:
            if one.version == other.version and one.overlaps(other):
                raise ConfigError(
                    "Two networks of a pod overlap, so one card would carry the traffic of both",
                    got=f"{one} and {other}",
                    fix="Give each card a subnet of its own.",
                )


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
            _network(network.master, key="master")


def _network(text: str, *, key: str = "subnet") -> IPv4Network | IPv6Network:
    try:
        return ip_network(text)
    except ValueError:
        raise ConfigError(
            f"networks.{key} is not a network",
            got=text,
            fix='Write its first address and prefix length, such as "10.10.1.0/24".',
        ) from None


def _is_inside(text: str, network: IPv4Network | IPv6Network) -> bool:
    try:
        return ip_address(text) in network
    except ValueError:
        return False


PROVIDERS = ("nad", "dra", "multi-nic-cni")
