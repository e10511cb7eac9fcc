"""Network cards of a pod beside its cluster's own network, as a file of networks declares them.

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
(pod_check.py). What it needs for that is rendered by render/attach.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_interface, ip_network
from typing import Any, Literal

from penstock.core.errors import ConfigError, nearest
from penstock.core.limits import Limit, check_limits, limited

NetworkType = Literal["macvlan", "ipvlan", "host-device", "sriov"]
Ipam = Literal["whereabouts", "host-local", "static"]

PROVIDERS = ("nad", "dra", "multi-nic-cni")
ANNOTATION = "k8s.v1.cni.cncf.io/networks"
"""Annotation of a pod by which Multus, and multi-nic-cni behind it, attach networks."""
DRANET = "dra.net"
"""Driver of the provider dra, and its DeviceClass."""
_MTU = Limit(
    least=1280,
    most=16_384,
    fix="Give the MTU of the card and of every switch, 1500 or 9000, or leave it out.",
)
_MASTER = Limit(
    pattern=r"[0-9a-fA-F:.]+/[0-9]{1,3}|[^\s/:\x00-\x1f.][^\s/:\x00-\x1f]{0,14}|\.[^\s/:\x00-\x1f.][^\s/:\x00-\x1f]{0,13}",
    longest=64,
    says="the name of an interface, of at most 15 characters, or a network",
    fix="`ip link` on a node lists the names.",
)
NAME = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
"""Regular expression of a name in Kubernetes, as labels and resources have them."""
DOMAIN = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*"
"""Regular expression of a DNS subdomain; it has at most 253 characters."""
PREFIX = f"{DOMAIN}/"
"""Regular expression of the domain before such a name."""
RESOURCE = Limit(
    pattern=f"{PREFIX}{NAME}",
    longest=317,
    says="the name of a resource of nodes",
    fix="Examples: nvidia.com/gpu, openshift.io/mlxnics.",
)
_CLASS = Limit(pattern=DOMAIN, longest=253, says="the name of a DeviceClass", fix="Example: gpu.nvidia.com.")
_SYSCTL = Limit(
    pattern=r"net(\.[A-Za-z0-9_][-A-Za-z0-9_]*)+",
    longest=255,
    says="settings of the network, whose names begin with net.",
    fix="Others are the node's, and not the interface's.",
)
_OWN_ADDRESSES_ONLY = {
    "net.ipv4.conf.IFNAME.arp_ignore": "1",
    "net.ipv4.conf.IFNAME.arp_announce": "2",
}

Object = Mapping[str, Any]  # Any: what JSON holds


@dataclass(frozen=True, slots=True, kw_only=True)
class PodNetwork:
    """Network card that every pod of a run gets."""

    master: str = limited(_MASTER, "")
    """Interface of the node, such as "ens1f0"; for multi-nic-cni the network of the nodes' cards, such as
    "10.0.1.0/24"."""
    resource: str = limited(RESOURCE, "")
    """Resource of a device plugin, such as "openshift.io/mlxnics", that holds cards or SR-IOV functions."""
    type: NetworkType = "macvlan"
    """CNI plugin. `host-device` and `sriov` hand over a whole card or virtual function; `macvlan` and
    `ipvlan` share a card among pods. Without meaning for `dra`, which hands the card over."""
    mtu: int = limited(_MTU, 0)
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
    sysctls: dict[str, str] = field(
        default_factory=lambda: dict(_OWN_ADDRESSES_ONLY), metadata={"limit": _SYSCTL}
    )
    """Kernel settings of the interface, IFNAME for its name. By default it answers ARP for its own addresses
    only: with several cards in one switch, all traffic to a pod may otherwise come in by one. On OpenShift
    the cluster's cni-sysctl-allowlist must have them; or give `{}` where each card has a VLAN of its own."""
    device_class: str = limited(_CLASS, DRANET)
    """DeviceClass of the card, for `dra`."""
    attributes: dict[str, str | int | bool] = field(default_factory=dict)
    """Attributes that DRANET publishes of the card, such as `rdma = true`, for `dra`."""
    gpu_class: str = limited(_CLASS, "")
    """DeviceClass of GPUs, such as "gpu.nvidia.com", for `dra`: an equal share of the pod's GPUs is claimed
    on the same PCIe root as this card; empty: cards and GPUs are claimed apart."""

    def __post_init__(self) -> None:
        check_limits(self, named="networks.{}", error=ConfigError)
        for name, value in self.sysctls.items():
            if not re.fullmatch(r"[-+.\w ]{1,64}", value):
                raise ConfigError(f"networks.sysctls sets {name} to what is no value", got=value)
        if "/" in self.master:
            network_of(self.master, key="master")
        network = network_of(self.subnet) if self.subnet else None
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
        if network and self.address and not _has_length(self.address, network):
            raise ConfigError(
                f"networks.address must have the prefix length of the subnet {self.subnet}",
                got=self.address,
                fix=f"Write {self.address.partition('/')[0]}/{network.prefixlen}.",
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
        check_provider(self.provider)
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


def check_addresses(networks: Sequence[PodNetwork], *, num_pods: int, provider: str) -> None:
    """Refuse networks with fewer addresses than a run has pods.

    Raises:
        ConfigError: with the subnet.
    """
    for network in networks:
        if not network.subnet or network.ipam != "whereabouts":
            continue
        subnet = network_of(network.subnet)
        unusable = 0 if provider == "dra" else bool(network.gateway) + 2 * (subnet.version == 4)
        num_usable = max(0, subnet.num_addresses - unusable)
        if num_usable < num_pods:
            raise ConfigError(
                f"networks.subnet has {num_usable} addresses for {num_pods} pods",
                got=network.subnet,
                fix="Give a larger one.",
            )


def check_provider(provider: str) -> None:
    """Refuse a provider that is unknown."""
    if provider not in PROVIDERS:
        raise ConfigError("Unknown network provider", got=provider, fix=nearest(provider, list(PROVIDERS)))


def network_of(text: str, *, key: str = "subnet") -> IPv4Network | IPv6Network:
    """Return a network that a file of networks names by its first address and prefix length.

    Args:
        key: of the file, for messages.

    Raises:
        ConfigError: it is none.
    """
    try:
        return ip_network(text)
    except ValueError:
        raise ConfigError(
            f"networks.{key} is not a network",
            got=text,
            fix='Write its first address and prefix length, such as "10.10.1.0/24".',
        ) from None


def _has_length(text: str, network: IPv4Network | IPv6Network) -> bool:
    try:
        return "/" in text and ip_interface(text).network == network
    except ValueError:
        return False


def _is_inside(text: str, network: IPv4Network | IPv6Network) -> bool:
    try:
        return ip_address(text) in network
    except ValueError:
        return False
