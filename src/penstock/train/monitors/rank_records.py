"""Records of every rank in RUN/ranks.jsonl: own time, waits, memory and bytes sent, as means over some steps.

    {"step": 400, "ranks": 1024, "hosts": [...], "devices": [...], "nics": [...]}    at each start
    {"step": 450, "steps": 50, "own_s": "...", "data_wait_s": "...", ...}    base64 of float32, one per rank

All ranks enter a sum in which each has filled its own places, and rank 0 writes the result. How often follows
from what that sum costs: as many steps lie between two that it takes less than a thousandth of their time.
The costs are in the sum too, so all ranks compute the same number.
"""

import math
import socket
from base64 import b64encode

import numpy as np

from penstock.core import clock
from penstock.core.network.nics import usable
from penstock.core.network.probe import probe_nics
from penstock.devices import accelerator
from penstock.obs.meter import Rates, peak_memory_bytes
from penstock.obs.metric_names import RANK_METRICS
from penstock.obs.sinks import Sink
from penstock.parallel.mesh import World, gather_values

MAX_SHARE = 0.001
"""Largest share of the time of training that the records take."""
_FIRST_EVERY = 10
_MAX_EVERY = 1000


def steps_between(*, cost_s: float, step_s: float) -> int:
    """Return the number of steps between two records.

    >>> steps_between(cost_s=0.004, step_s=0.5), steps_between(cost_s=0.0001, step_s=2.0)
    (8, 1)
    """
    return min(_MAX_EVERY, max(1, math.ceil(cost_s / (MAX_SHARE * max(step_s, 1e-9)))))


def _nics() -> str:
    """Return the names of this machine's network cards; "" if it does not tell: they are only shown."""
    try:
        return ", ".join(nic.name for nic in usable(probe_nics()))
    except (OSError, ValueError):
        return ""


class RankRecords:
    """Accumulates this rank's values, and records those of all ranks now and then.

    Args:
        sink: of rank 0; None on the others.
        step: steps taken so far.
    """

    def __init__(self, world: World, sink: Sink | None, *, step: int) -> None:
        self._world, self._sink = world, sink
        self._due, self._num_steps, self._step_s = step + _FIRST_EVERY, 0, 0.0
        self._sums = dict.fromkeys(RANK_METRICS, 0.0)
        self._cost_s = 0.0
        self.sent_bytes = 0
        """Bytes that this rank sends in a step, as counted last."""
        places = gather_values([socket.gethostname(), accelerator.name_of(world.device), _nics()])
        self._places = {
            name: [place[number] for place in places]
            for number, name in enumerate(("hosts", "devices", "nics"))
        }

    def add(self, rates: Rates, *, step: int) -> None:
        """Add a step; record if that is due. Every rank must call it."""
        if self._places and self._sink is not None:
            self._sink({"step": step - 1, "ranks": self._world.ranks.world_size, **self._places})
        self._places = {}
        blocked = rates.shares.get("communication", 0.0)
        device = self._world.device
        is_away = accelerator.is_accelerator(device)
        values = {
            "own_s": rates.step_s * (1 - blocked),
            "data_wait_s": rates.step_s * rates.shares.get("data_wait", 0.0),
            "blocked_s": rates.step_s * blocked,
            "memory_bytes": accelerator.peak_bytes(device) if is_away else peak_memory_bytes(),
            "sent_bytes": self.sent_bytes,
        }
        self._sums = {name: self._sums[name] + value for name, value in values.items()}
        self._step_s += rates.step_s
        self._num_steps += 1
        if step >= self._due:
            self._record(step)

    def _record(self, step: int) -> None:
        begin, who, number = clock.monotonic(), self._world.ranks, self._num_steps
        mine = np.zeros((len(RANK_METRICS), who.world_size))
        mine[:, who.rank] = [self._sums[name] / number for name in RANK_METRICS]
        *total, cost_s, step_s = self._world.sum(*mine.ravel().tolist(), self._cost_s, self._step_s / number)
        if self._sink is not None:
            table = np.array(total, dtype="<f4").reshape(mine.shape)
            packed = {
                name: b64encode(row.tobytes()).decode() for name, row in zip(RANK_METRICS, table, strict=True)
            }
            self._sink({"step": step, "steps": number, **packed})
        self._cost_s = clock.monotonic() - begin
        every = steps_between(cost_s=cost_s, step_s=step_s) if cost_s else _FIRST_EVERY
        self._due, self._num_steps, self._step_s = step + every, 0, 0.0
        self._sums = dict.fromkeys(RANK_METRICS, 0.0)
