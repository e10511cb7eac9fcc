"""Monitors called between steps: traces, network traffic, stragglers, watchdog.

A rank's own time in a step is the wall time minus the time blocked on communication. In fully sharded data
parallel all ranks end a step together, so the wall time does not show which one is slow.
"""

from dataclasses import dataclass
from statistics import median

from penstock.core.log import EventLog
from penstock.obs.meter import Rates
from penstock.obs.sinks import Record
from penstock.parallel.flight_recorder import TrafficMeter
from penstock.parallel.mesh import World
from penstock.train.monitors.deadline import Deadline
from penstock.train.monitors.rank_records import RankRecords
from penstock.train.monitors.tracing import Windows
from penstock.train.monitors.watchdog import Watchdog

log = EventLog(__name__)


class Stragglers:
    """Accumulates this rank's own times, and compares them with the other ranks' now and then.

    Args:
        every: steps between comparisons; 0: never.
        ratio: ratio of the slowest rank's time to the median from which on a warning is logged.
    """

    def __init__(self, world: World, *, every: int, ratio: float) -> None:
        self._world, self._every, self._ratio = world, every, ratio
        self._own_s, self._steps = 0.0, 0

    def add(self, rates: Rates, *, step: int) -> list[Record]:
        """Add a step; return a record if a comparison is due. Every rank must call it."""
        self._own_s += rates.step_s * (1 - rates.shares.get("communication", 0.0))
        self._steps += 1
        if not self._every or step % self._every or self._world.ranks.world_size == 1:
            return []
        own_s, self._own_s, steps, self._steps = self._own_s, 0.0, self._steps, 0
        who = self._world.ranks
        times = self._world.sum(
            *(own_s / steps if rank == who.rank else 0.0 for rank in range(who.world_size))
        )
        slowest = max(range(who.world_size), key=times.__getitem__)
        middle = median(times)
        if times[slowest] >= self._ratio * middle and self._world.is_first:
            log.warning(
                "straggler",
                "The others wait for rank {rank}: its own work took {own_s:.3f} s a step, the median "
                "{median_s:.3f} s (steps {first:,} to {last:,})",
                rank=slowest,
                own_s=times[slowest],
                median_s=middle,
                first=step - steps + 1,
                last=step,
            )
        return [
            {
                "event": "ranks",
                "step": step,
                "slowest_rank": slowest,
                "slowest_s": times[slowest],
                "median_s": middle,
            }
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMonitors:
    """Optional monitors of a run."""

    watchdog: Watchdog | None = None
    deadline: Deadline | None = None
    windows: Windows | None = None
    traffic: TrafficMeter | None = None
    stragglers: Stragglers | None = None
    ranks: RankRecords | None = None

    def begin(self, step: int) -> None:
        """Record the start of a step, counted from 1."""
        self.doing("step", step=step)
        if self.windows is not None:
            self.windows.begin(step)
        if self.traffic is not None:
            self.traffic.begin()

    def doing(self, what: str, *, step: int) -> None:
        """Record this rank's present activity, for hang reports."""
        if self.watchdog is not None:
            self.watchdog.doing(what, step=step)

    def stopping(self, at: float) -> None:
        """Record that this rank or another was asked to stop, at time `at`."""
        if self.deadline is not None:
            self.deadline.requested(at)

    def end(self, step: int, shape: tuple[int, ...], rates: Rates) -> list[Record]:
        """Record the end of a step; return its records. Every rank must call it.

        Args:
            shape: shape of this rank's batch.
        """
        if self.windows is not None:
            self.windows.end(step)
        sent = self.traffic.end(shape) if self.traffic is not None else None
        if self.ranks is not None:
            if sent and isinstance(by_axis := sent["sent_bytes"], dict):
                self.ranks.sent_bytes = sum(by_axis.values())
            self.ranks.add(rates, step=step)
        records: list[Record] = [{"event": "traffic", "step": step, **sent}] if sent else []
        return records + (self.stragglers.add(rates, step=step) if self.stragglers is not None else [])
