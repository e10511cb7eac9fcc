"""A node of a run: its environment, secrets and networks are checked and set before processes start."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.core import env
from penstock.core.errors import PenstockError, UsageError
from penstock.core.network.nics import Nic, usable
from penstock.core.network.probe import probe_nics
from penstock.core.network.settings import (
    INTERFACE_VARIABLES,
    Setting,
    gloo_settings,
    interfaces_in,
    nccl_settings,
)
from penstock.launch.spec import RunSpec, Secret


def prepare(spec: RunSpec, settings: Sequence[Setting] = ()) -> None:
    """Check this node, and set the variables that processes forked from here on have.

    Args:
        settings: of the engine.

    Raises:
        PenstockError: a folder, a secret or an interface is missing on this node.
    """
    check_storage(spec.storage)
    nics = probe_nics() if spec.networks else []
    networks = network_variables(spec.networks, nics, _variables(spec)) if spec.networks else {}
    values = {setting.name: setting.value for setting in settings}
    given = {name: value for name, value in networks.items() if not env.variable(name)}
    env.set_variables({**values, **given, **dict(spec.environment), **secret_values(spec.secrets)})


def check_node(spec: RunSpec) -> None:
    """Check this node, and change nothing.

    Raises:
        PenstockError: a folder, a secret or an interface is missing on it.
    """
    check_storage(spec.storage)
    if spec.networks:
        network_variables(spec.networks, probe_nics(), _variables(spec))
    secret_values(spec.secrets)


def _variables(spec: RunSpec) -> Mapping[str, str]:
    return {**env.variables(*INTERFACE_VARIABLES), **dict(spec.environment)}


def check_storage(folders: Sequence[str]) -> None:
    """Refuse a node that does not see a folder of the run.

    Raises:
        PenstockError: the message names the folder.
    """
    for folder in folders:
        if not Path(folder).exists():
            raise PenstockError(
                "A folder of the run does not exist on this node",
                got=folder,
                fix="Mount the file system that holds it on every node, or give another path in the recipe.",
            )


def network_variables(
    wanted: Sequence[str], nics: Sequence[Nic], variables: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return gloo's and NCCL's variables for the named interfaces of this node.

    Args:
        variables: those already set, by the shell that submits or by --env.

    Raises:
        PenstockError: one cannot carry the run, or a variable names others. The message has both lists.
            Nothing else is chosen instead.
    """
    chosen = named(wanted, nics)
    left = {nic.name for nic in chosen} - {nic.name for nic in usable(chosen)}
    if faults := [_why_not_used(nic) for nic in chosen if nic.name in left]:
        raise _lacking(faults, wanted, nics)
    for name in INTERFACE_VARIABLES:
        given = (variables or {}).get(name, "")
        if given and interfaces_in(given) != set(wanted):
            raise PenstockError(
                f"{name} is set to interfaces other than those of --network ({', '.join(wanted)})",
                got=given,
                fix="Take it out of --env, or unset it in the shell that submits. It follows from --network.",
            )
    return {setting.name: setting.value for setting in [*gloo_settings(chosen), *nccl_settings(chosen)]}


def named(wanted: Sequence[str], nics: Sequence[Nic]) -> list[Nic]:
    """Return the named interfaces.

    Raises:
        PenstockError: one is not here, not up or has no address; the message has both lists. Nothing else is
            chosen instead.
    """
    by_name = {nic.name: nic for nic in nics}
    if faults := [fault for name in wanted if (fault := _fault(name, by_name.get(name)))]:
        raise _lacking(faults, wanted, nics)
    return [by_name[name] for name in wanted]


def _fault(name: str, nic: Nic | None) -> str:
    """Return what an interface lacks; empty: nothing."""
    if nic is None:
        return f"{name} is missing"
    if not nic.is_up:
        return f"{name} is down"
    return "" if nic.networks else f"{name} has no address"


def _why_not_used(nic: Nic) -> str:
    """Return why `usable` leaves out an interface that is up and has an address."""
    if usable([nic]):
        return f"{nic.name} is less than half as fast as another"
    return f"{nic.name} is of the kind {nic.driver}, and has not the default route"


def _lacking(faults: Sequence[str], wanted: Sequence[str], nics: Sequence[Nic]) -> PenstockError:
    up = ", ".join(nic.name for nic in nics if nic.is_up) or "none"
    return PenstockError(
        f"This node lacks networks of the run: {'; '.join(faults)}. Named: {', '.join(wanted)}; up are {up}",
        fix="Correct --network, or exclude this node. No other interface is used instead.",
    )


def address_on(wanted: Sequence[str], nics: Sequence[Nic]) -> str:
    """Return this node's address on the first of the named interfaces; empty if none is named or has one.

    >>> address_on(["eth1"], [Nic(name="eth1", is_up=True, mtu=9000, addresses=("10.1.0.2/24",))])
    '10.1.0.2'
    """
    found = [nic.addresses[0] for name in wanted for nic in nics if nic.name == name and nic.addresses]
    return found[0].partition("/")[0] if found else ""


def secret_values(secrets: Sequence[Secret]) -> Mapping[str, str]:
    """Return the values of secrets.

    Raises:
        UsageError: a variable or file is missing; values are never shown.
    """
    found = {}
    for secret in secrets:
        kind, _, where = secret.source.partition(":")
        if kind in ("env", "key"):
            value = env.variable(where if kind == "env" else secret.name)
        else:
            try:
                value = Path(where).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError):
                value = ""
        if not value:
            what = {"env": "The variable", "file": "The file", "key": "The Secret"}[kind] + f" {where}"
            raise UsageError(
                f"{what}, which holds the secret {secret.name}, is empty or cannot be read here",
                fix="Set it where the run is submitted."
                if kind == "env"
                else "Make it readable on every node.",
            )
        found[secret.name] = value
    return found
