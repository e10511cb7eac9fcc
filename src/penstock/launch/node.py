"""A node of a run: its environment, secrets and networks are checked and set before processes start."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.core import env
from penstock.core.errors import PenstockError, UsageError
from penstock.launch.network_settings import Setting, gloo_settings, nccl_settings
from penstock.launch.nics import Nic
from penstock.launch.probe import probe_nics
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
    networks = network_variables(spec.networks, nics) if spec.networks else {}
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
        network_variables(spec.networks, probe_nics())
    secret_values(spec.secrets)


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


def network_variables(wanted: Sequence[str], nics: Sequence[Nic]) -> dict[str, str]:
    """Return gloo's and NCCL's variables for the named interfaces of this node.

    Raises:
        PenstockError: one is not here or not up; the message has both lists. Nothing else is chosen instead.
    """
    chosen = named(wanted, nics)
    return {setting.name: setting.value for setting in [*gloo_settings(chosen), *nccl_settings(chosen)]}


def named(wanted: Sequence[str], nics: Sequence[Nic]) -> list[Nic]:
    """Return the named interfaces.

    Raises:
        PenstockError: one is not here or not up; the message has both lists. Nothing else is chosen instead.
    """
    by_name = {nic.name: nic for nic in nics}
    missing = [name for name in wanted if name not in by_name or not by_name[name].is_up]
    if missing:
        up = ", ".join(nic.name for nic in nics if nic.is_up) or "none"
        raise PenstockError(
            f"This node lacks networks of the run: {', '.join(missing)} of {', '.join(wanted)}; up are {up}",
            fix="Correct --network, or exclude this node. No other interface is used instead.",
        )
    return [by_name[name] for name in wanted]


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
