"""Check: kernel settings that limit TCP."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.core.network.nics import usable
from penstock.core.network.probe import probe_nics
from penstock.core.units import mib
from penstock.doctor.checks.check import CheckOptions, Finding, green, yellow
from penstock.doctor.checks.proc_files import text_of

CHECK = "kernel"

_ROUND_TRIP_S = 0.001
"""Assumed round trip; within a data centre it is less. A buffer must hold the bytes in flight during it."""
_MIN_BACKLOG = 1024
"""Minimum accept queue: all ranks connect to one of them at once."""
_BUFFERS = ("net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem")
_NAMES = (*_BUFFERS, "net.core.somaxconn", "net.ipv4.tcp_slow_start_after_idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """Settings by name, as text; those hidden by a container are absent."""

    settings: dict[str, str]
    speed_mbit_s: int
    """Speed of the fastest interface; 0: unknown."""
    num_nodes: int


def measure(options: CheckOptions) -> KernelFacts:
    """Read /proc/sys."""
    read = {name: text_of(Path("/proc/sys", *name.split("."))) for name in _NAMES}
    speeds = [nic.speed_mbit_s or 0 for nic in usable(probe_nics()) if nic.has_true_speed]
    settings = {name: text for name, text in read.items() if text}
    return KernelFacts(settings=settings, speed_mbit_s=max(speeds, default=0), num_nodes=options.num_nodes)


def judge(facts: KernelFacts) -> Iterator[Finding]:
    """Compare the settings with the needs of the fastest interface."""
    found = [*_buffers(facts), *_backlog(facts), *_idle(facts)] if facts.num_nodes > 1 else []
    yield from found
    if not found:
        shown = ", ".join(f"{name}={' '.join(text.split())}" for name, text in facts.settings.items())
        yield green(shown or "No settings to read")


def _buffers(facts: KernelFacts) -> Iterator[Finding]:
    needed = int(facts.speed_mbit_s * 1e6 / 8 * _ROUND_TRIP_S)
    for name in _BUFFERS:
        sizes = facts.settings.get(name, "").split()
        if len(sizes) == 3 and int(sizes[2]) < needed:
            yield yellow(
                f"{name} lets a connection have {mib(int(sizes[2]))} on its way, where "
                f"{facts.speed_mbit_s / 1000:g} Gbit/s for a millisecond are {mib(needed)}",
                remedy=f"sysctl -w {name}='{sizes[0]} {sizes[1]} {2 * needed}'",
            )


def _backlog(facts: KernelFacts) -> Iterator[Finding]:
    text = facts.settings.get("net.core.somaxconn", "")
    if text.isdecimal() and int(text) < _MIN_BACKLOG:
        yield yellow(
            f"net.core.somaxconn is {text}: ranks that connect at once may be refused",
            remedy="sysctl -w net.core.somaxconn=4096",
        )


def _idle(facts: KernelFacts) -> Iterator[Finding]:
    if facts.settings.get("net.ipv4.tcp_slow_start_after_idle") == "1":
        yield yellow(
            "net.ipv4.tcp_slow_start_after_idle is 1: after a pause for compute, connections start slowly",
            remedy="sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
        )
