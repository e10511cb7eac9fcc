"""Reader of torch's flight recorder: the last collectives of this rank.

The recorder is always on, for gloo and NCCL, at the cost of a small entry per collective. It tells what a
step sent, and after a hang which collective each rank had reached.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json, _resolve_process_group  # type: ignore[attr-defined]

from penstock.core.env import local_world_size
from penstock.core.log import EventLog
from penstock.obs.traffic import Collective, by_axis
from penstock.parallel.ethernet.all_to_all import MESSAGES
from penstock.parallel.mesh import Mesh

log = EventLog(__name__)

_BYTES = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2,
    "Byte": 1, "Char": 1, "Bool": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """A range of the recorder's entries."""

    last: int
    """Number of the last recorded collective; -1: none."""
    collectives: tuple[Collective, ...]
    is_whole: bool
    """True if no entry of the range was overwritten."""


def last_collectives(number: int) -> list[dict[str, object]]:
    """Return the recorder's last entries, latest last, in torch's format."""
    entries: list[dict[str, object]] = json.loads(_dump_fr_trace_json()).get("entries", [])
    return sorted(entries, key=lambda entry: int(str(entry["record_id"])))[-number:]


def recorded(after: int = -1) -> RecordedCollective:
    """Return the collectives that this rank started after number `after`."""
    entries = json.loads(_dump_fr_trace_json()).get("entries", [])
    numbers = [entry["record_id"] for entry in entries]
    new = [entry for entry in entries if entry["record_id"] > after]
    is_whole = not numbers or min(numbers) <= after + 1
    return RecordedCollective(max(numbers, default=after), tuple(map(_collective, new)), is_whole)


def _collective(entry: dict[str, list[list[int]]]) -> Collective:
    name, group = str(entry["profiling_name"]), str(entry["process_group"][0])
    kind = name.partition(":")[2].lstrip("_").partition(" ")[0]  # "nccl:send 0->1"
    given, taken = (
        sum(
            math.prod(size) * _BYTES.get(str(dtype), 4)
            for size, dtype in zip(entry[f"{side}_sizes"], entry[f"{side}_dtypes"], strict=False)
        )
        for side in ("input", "output")
    )
    # for a traceable gather, gloo records the output with the size of the input
    return Collective(group, kind, given if kind == "all_gather" else max(given, taken))


class TrafficMeter:
    """Measures what this rank sends in a step, once per batch shape, because it does not vary otherwise.

    Args:
        sent_by_stages: returns the bytes sent to other pipeline stages so far; under gloo, point-to-point
            messages are not in the recorder.
    """

    def __init__(self, mesh: Mesh, *, sent_by_stages: Callable[[], int] = lambda: 0) -> None:
        groups = {axis: mesh.state[axis].get_group() for axis in mesh.state.mesh_dim_names or ()}
        groups |= {"context": mesh.context.get_group(), "pipeline": mesh.pipeline.get_group()}
        several = {axis: group for axis, group in groups.items() if group.size() > 1}
        self._ranks = {axis: dist.get_process_group_ranks(group) for axis, group in several.items()}
        self._axes = {str(group.group_name): axis for axis, group in several.items()}
        self._sizes = {str(group.group_name): group.size() for group in several.values()}
        self._sizes[""] = dist.get_world_size()
        machine = local_world_size()
        self._far = [
            axis for axis, ranks in self._ranks.items() if len({rank // machine for rank in ranks}) > 1
        ]
        self._known: set[tuple[int, ...]] = set()
        self._shape: tuple[int, ...] | None = None
        self._last = -1
        self._sent_by_stages, self._sent_before = sent_by_stages, 0
        self._messages_before = MESSAGES.sent_bytes.copy()

    def begin(self) -> None:
        """Record the counters, if the previous step was the first with its batch shape."""
        if self._shape is not None and self._shape not in self._known:
            self._last = recorded().last
            self._sent_before = self._sent_by_stages()
            self._messages_before = MESSAGES.sent_bytes.copy()

    def end(self, shape: tuple[int, ...]) -> dict[str, object] | None:
        """Return what the step sent, if it was the second with its shape: the first may have set-up
        traffic."""
        expected, self._shape = self._shape, shape
        if shape in self._known or shape != expected:
            return None
        self._known.add(shape)
        found = recorded(self._last)
        if not found.is_whole:
            log.warning(
                "traffic_uncounted",
                "Traffic is not counted: a step has more collectives than TORCH_FR_BUFFER_SIZE entries",
            )
            return None
        messages = MESSAGES.sent_bytes - self._messages_before
        for group in {*(one.group for one in found.collectives), *messages} - self._sizes.keys():
            self._meet(group)
        sent = by_axis(found.collectives, axes=self._axes, sizes=self._sizes, messages=messages)
        if stages := self._sent_by_stages() - self._sent_before:
            sent["pipeline"] = sent.get("pipeline", 0) + stages
        return {"sent_bytes": sent, "network_axes": self._far}

    def _meet(self, name: str) -> None:
        """Add a process group that is a part of an axis, such as the ranks that share a head."""
        try:
            group = _resolve_process_group(cast(Any, name))
        except (KeyError, RuntimeError, ValueError):  # of all ranks: recorded under another name, or gone
            return
        ranks = set(dist.get_process_group_ranks(group))
        within = [axis for axis, others in self._ranks.items() if ranks < set(others)]
        if within:
            self._axes[name] = min(within, key=lambda axis: len(self._ranks[axis]))
            self._sizes[name] = len(ranks)
