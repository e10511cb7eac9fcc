"""Look at steps from outside the step: traces, traffic, who is slow, and whether there still are any."""

from dataclasses import dataclass

from penstock.obs.meter import Rates
from penstock.obs.sinks import Record
from penstock.parallel.recorder import TrafficMeter
from penstock.train.deadline import Deadline
from penstock.train.stragglers import Stragglers
from penstock.train.tracing import Windows
from penstock.train.watchdog import Watchdog


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What looks at steps; nothing, unless it is given."""

    watchdog: Watchdog | None = None
    deadline: Deadline | None = None
    windows: Windows | None = None
    traffic: TrafficMeter | None = None
    stragglers: Stragglers | None = None

    def begin(self, step: int) -> None:
        """Say that a step, counted from 1, begins."""
        self.doing("step", step=step)
        if self.windows is not None:
            self.windows.begin(step)
        if self.traffic is not None:
            self.traffic.begin()

    def doing(self, what: str, *, step: int) -> None:
        """Say what this rank begins, for the report of a hang."""
        if self.watchdog is not None:
            self.watchdog.doing(what, step=step)

    def stopping(self, at: float) -> None:
        """Say that this rank was asked to stop, or heard that another was, at that time."""
        if self.deadline is not None:
            self.deadline.requested(at)

    def end(self, step: int, shape: tuple[int, ...], rates: Rates) -> list[Record]:
        """Say that a step ended; return what is to be recorded of it. Every rank must call it.

        Args:
            shape: of this rank's batch.
        """
        if self.windows is not None:
            self.windows.end(step)
        sent = self.traffic.end(shape) if self.traffic is not None else None
        records: list[Record] = [{"event": "traffic", "step": step, **sent}] if sent else []
        return records + (self.stragglers.add(rates, step=step) if self.stragglers is not None else [])
