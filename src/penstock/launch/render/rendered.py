"""Result of a renderer: files, commands, objects and settings."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.core.network.settings import Setting
from penstock.core.yaml_text import yaml_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A run as its engine gets it; applying it is all that submitting does."""

    files: Mapping[str, str]
    """Absolute path -> content."""
    commands: tuple[tuple[str, ...], ...]
    """Commands that submit the run, in order."""
    settings: tuple[Setting, ...]
    """Every setting with its reason."""
    objects: tuple[Mapping[str, Any], ...] = ()  # Any: JSON
    """Objects of Kubernetes, in the order in which they are applied."""

    def as_text(self) -> str:
        """Return files, objects and commands for a terminal."""
        parts = [f"# {path}\n{content.rstrip()}" for path, content in self.files.items()]
        parts += (
            ["\n".join(f"---\n{yaml_text(found).rstrip()}" for found in self.objects)] if self.objects else []
        )
        parts += [f"$ {shlex.join(command)}" for command in self.commands]
        return "\n\n".join(parts)


def ceiling(
    *, nodes: int, devices_per_node: int, seconds: float, price_per_node_hour: float, max_requeues: int = 0
) -> Sequence[str]:
    r"""Return what a run can cost at most, in lines: one start, then all of them.

    Args:
        seconds: time limit of a start; 0: none.
        max_requeues: times that it starts again at that limit.

    >>> print(*ceiling(nodes=4, devices_per_node=8, seconds=7200, price_per_node_hour=32.5), sep="\n")
    at most 64 device-hours a start (4 nodes x 8 devices x 2 h)
    at most 260.00 a start in the cluster file's currency
    """
    if not seconds:
        return ["no ceiling of device-hours: the run has no time limit (--time-limit)"]
    hours = seconds / 3600
    device_hours, price = nodes * devices_per_node * hours, nodes * hours * price_per_node_hour
    lines = [
        f"at most {device_hours:g} device-hours a start "
        f"({nodes} node{'s' if nodes > 1 else ''} x {devices_per_node} device"
        f"{'s' if devices_per_node > 1 else ''} x {hours:g} h)"
    ]
    if price:
        lines.append(f"at most {price:.2f} a start in the cluster file's currency")
    if (starts := max_requeues + 1) > 1:
        costs = f", {starts * price:.2f}" if price else ""
        lines.append(
            f"at most {starts} starts (--max-requeues {max_requeues}): {starts * device_hours:g} "
            f"device-hours{costs}"
        )
    return lines
