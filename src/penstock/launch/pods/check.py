"""Network settings of a pod, from the interfaces that it really has; a pod without its cards does not start.

A pod that did not get its cards still has eth0, through which a run works: slowly, and nobody notices. So
what was declared is compared with what is there, and a difference ends the start. The routes count too: gloo
and NCCL listen on the interfaces that they are told, and connect by those to which the routes lead. Pure.
"""

from collections.abc import Mapping, Sequence
from ipaddress import ip_interface, ip_network

from penstock.core.errors import PenstockError
from penstock.core.network.nics import Nic, usable
from penstock.core.network.settings import (
    INTERFACE_VARIABLES,
    Setting,
    gloo_settings,
    interfaces_in,
    nccl_settings,
)
from penstock.launch.pod_networks import DeclaredInterface


def check_networks(
    declared: Sequence[DeclaredInterface],
    present: Sequence[Nic],
    variables: Mapping[str, str] | None = None,
) -> list[Setting]:
    """Return gloo's and NCCL's variables for the declared interfaces of this pod.

    Args:
        declared: from `pod_networks.declared`; empty: nothing was declared, and all usable ones are taken.
        present: from `probe.probe_nics`.
        variables: those already set, by the image or the recipe.

    Raises:
        PenstockError: an interface is missing, down, in another subnet or of another MTU, or a variable names
            others. The message has both lists.
    """
    if not declared:
        return [*gloo_settings(present), *nccl_settings(present)]
    by_name = {nic.name: nic for nic in present}
    faults = [fault for wanted in declared if (fault := _fault(wanted, by_name.get(wanted.name)))]
    chosen = [by_name[wanted.name] for wanted in declared if wanted.name in by_name]
    if not faults:
        left = {nic.name for nic in chosen} - {nic.name for nic in usable(chosen)}
        faults = [f"{name} is less than half as fast as another" for name in sorted(left)]
    if faults:
        raise PenstockError(
            f"This pod does not have its networks: {'; '.join(faults)}. Declared: "
            f"{', '.join(map(str, declared))}. Present: {', '.join(map(_shown, present)) or 'none'}",
            fix="See the pod's events (kubectl describe pod), and correct [[networks]] or the node. No other "
            "interface is used instead.",
        )
    settings = [*gloo_settings(chosen), *nccl_settings(chosen)]
    for setting in settings:
        given = (variables or {}).get(setting.name, "")
        is_other = given and interfaces_in(given) != interfaces_in(setting.value)
        if setting.name in INTERFACE_VARIABLES and is_other:
            raise PenstockError(
                f"{setting.name} is set to interfaces other than the declared ones. Declared: "
                f"{', '.join(map(str, declared))}. Set",
                got=given,
                fix="Take the variable out of the image and of --env: it follows from [[networks]].",
            )
    return settings


def _fault(wanted: DeclaredInterface, nic: Nic | None) -> str:
    """Return what is wrong with an interface; empty: nothing."""
    if nic is None:
        return f"{wanted.name} is missing"
    if not nic.is_up:
        return f"{wanted.name} is down"
    if not nic.networks:
        return f"{wanted.name} has no address"
    if wanted.subnet and not any(_is_in(address, wanted.subnet) for address in nic.addresses):
        return f"{wanted.name} has no address in {wanted.subnet}"
    if wanted.mtu and nic.mtu != wanted.mtu:
        return f"{wanted.name} has an MTU of {nic.mtu}, not {wanted.mtu}"
    if not nic.carries_own_network:
        return f"{wanted.name} does not carry {nic.networks[0]}: the routes lead elsewhere"
    return ""


def _is_in(address: str, subnet: str) -> bool:
    return ip_interface(address).ip in ip_network(subnet)


def _shown(nic: Nic) -> str:
    """Return an interface as text.

    >>> _shown(Nic(name="eth0", is_up=True, mtu=1500, addresses=("10.0.0.2/24",)))
    'eth0 (10.0.0.2/24, MTU 1500)'
    """
    state = [] if nic.is_up else ["down"]
    return f"{nic.name} ({', '.join([*state, *nic.addresses[:1], f'MTU {nic.mtu}'])})"
