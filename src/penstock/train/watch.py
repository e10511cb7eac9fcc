"""Look at single steps from outside the step: traces of some, the traffic of one."""

from dataclasses import dataclass

from penstock.obs.sinks import Record
from penstock.parallel.recorder import TrafficMeter
from penstock.train.tracing import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What looks at steps; nothing, unless it is given."""

    windows: Windows | None = None
    traffic: TrafficMeter | None = None

    def begin(self, step: int) -> None:
        """Say that a step, counted from 1, begins."""
        if self.windows is not None:
            self.windows.begin(step)
        if self.traffic is not None:
            self.traffic.begin()

    def end(self, step: int, shape: tuple[int, ...]) -> list[Record]:
        """Say that it ended; return what is to be recorded of it.

        Args:
            shape: of this rank's batch.
        """
        if self.windows is not None:
            self.windows.end(step)
        sent = self.traffic.end(shape) if self.traffic is not None else None
        return [{"event": "traffic", "step": step, **sent}] if sent else []
