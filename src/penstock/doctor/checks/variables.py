"""Check: environment variables of gloo, NCCL and torch, compared with those advised for the interfaces."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.core import env
from penstock.core.errors import nearest
from penstock.core.network.nics import Nic, usable
from penstock.core.network.probe import probe_nics
from penstock.core.network.settings import Setting, gloo_settings, nccl_settings
from penstock.devices import accelerator
from penstock.doctor.checks.check import CheckOptions, Finding, green, red, yellow

CHECK = "variables"

_PREFIXES = ("GLOO_", "NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "PYTORCH_ALLOC", "PYTORCH_CUDA_ALLOC")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SLOWS = {
    "NCCL_P2P_DISABLE": "devices of a machine do not copy to each other directly",
    "NCCL_SHM_DISABLE": "devices of a machine do not talk through shared memory",
    "NCCL_LAUNCH_MODE": "it is for debugging",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is checked against the others'",
}
_OFF = ("", "0", "OFF", "off", "PARALLEL")


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableFacts:
    """Environment variables that are set, and the interfaces they concern."""

    in_force: Mapping[str, str]
    nics: tuple[Nic, ...]
    num_nodes: int
    num_devices: int


def measure(options: CheckOptions) -> VariableFacts:
    """Read the environment."""
    return VariableFacts(
        in_force=env.variables(*_PREFIXES),
        nics=tuple(probe_nics()),
        num_nodes=options.num_nodes,
        num_devices=accelerator.count(),
    )


def advised(facts: VariableFacts) -> list[Setting]:
    """Return the variables advised for a run on several machines; NCCL's if there are devices."""
    if facts.num_nodes == 1:
        return []
    return gloo_settings(facts.nics) + (nccl_settings(facts.nics) if facts.num_devices else [])


def judge(facts: VariableFacts) -> Iterator[Finding]:
    """Judge which variables are wrong, differ from the advice, or are missing."""
    in_force = ", ".join(f"{name}={value}" for name, value in facts.in_force.items())
    yield green(f"In force: {in_force}" if in_force else "None is set")
    for name, why in _SLOWS.items():
        if facts.in_force.get(name, "") not in _OFF:
            yield yellow(f"{name}={facts.in_force[name]}: {why}", remedy=f"unset {name}")
    if facts.num_nodes == 1:
        return
    wrong = [finding for name in _INTERFACES for finding in _unknown(name, facts)]
    yield from wrong
    for setting in advised(facts):
        if not (wrong and setting.name in _INTERFACES):
            yield from _compared(setting, facts)


def _unknown(name: str, facts: VariableFacts) -> Iterator[Finding]:
    """Yield findings on named interfaces that do not exist or lead nowhere. A leading ^ excludes."""
    text = facts.in_force.get(name, "")
    if not text or text.startswith("^"):
        return
    known = [nic.name for nic in facts.nics]
    for word in text.removeprefix("=").split(","):
        if word == "lo":
            yield red(f"{name}={text}: the loopback reaches no other machine", remedy=f"unset {name}")
        elif not (word in known or (name.startswith("NCCL") and any(nic.startswith(word) for nic in known))):
            yield red(f"{name}={text}: this machine has no {word!r}", remedy=nearest(word, known))


def _compared(setting: Setting, facts: VariableFacts) -> Iterator[Finding]:
    value = facts.in_force.get(setting.name)
    if value == setting.value or (value is not None and value.lstrip("=") == setting.value.lstrip("=")):
        return
    remedy = f"export {setting.name}={setting.value}"
    if value is not None:
        yield yellow(f"{setting.name}={value}; advised: {setting.reason}", remedy=remedy)
    elif setting.name not in _INTERFACES or len(usable(facts.nics)) > 1 or _goes_elsewhere(facts):
        yield yellow(f"{setting.name} is not set: {setting.reason}", remedy=remedy)


def _goes_elsewhere(facts: VariableFacts) -> bool:
    """Return True if a library, left to itself, may choose another interface than the right one."""
    up = {nic.name for nic in facts.nics if nic.is_up and nic.networks}
    return up != {nic.name for nic in usable(facts.nics)}
