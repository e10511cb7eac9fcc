"""Attachment of network cards to a job's pods, by any provider: objects, and fields of the pods. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

from penstock.core.errors import ConfigError
from penstock.launch.pod_networks import Attachment, PodNetwork, check_provider
from penstock.launch.render.dra import by_dra
from penstock.launch.render.multi_nic_cni import by_multi_nic_cni
from penstock.launch.render.nad import by_nad


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
    check_provider(provider)
    if not networks:
        return Attachment()
    _check_apart(networks)
    if provider == "dra":
        return by_dra(name, namespace, labels, networks, gpus=gpus)
    _check_addresses(networks, provider, pods=pods)
    if provider == "multi-nic-cni":
        return by_multi_nic_cni(name, namespace, labels, networks)
    return by_nad(name, namespace, labels, networks)


def _check_apart(networks: Sequence[PodNetwork]) -> None:
    """Refuse the same card twice."""
    seen = Counter(network.master for network in networks if network.master)
    for master, count in seen.items():
        if count > 1:
            raise ConfigError(f"{count} networks have the same master", got=master, fix="One for each card.")


def _check_addresses(networks: Sequence[PodNetwork], provider: str, *, pods: int) -> None:
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
