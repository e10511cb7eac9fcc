"""Device-hours of a run: what it has used of its machines, through all its jobs, lost steps included.

A job counts from its start, before models and data are opened, to its last record, on all of its processes.
The time between two jobs is not counted. Each job goes on from the newest figure in metrics.jsonl, which it
reads before records of lost steps are dropped.
"""

import re
from pathlib import Path

from penstock.core import clock

_FIGURE = re.compile(rb'"device_hours": ([0-9.e+-]+)[,}]')  # of whole records
_TAIL_BYTES = 1 << 20
_HOUR_S = 3600.0


class DeviceHours:
    """Counts from its construction.

    Args:
        metrics: records of the run's jobs before; may be missing.
        num_devices: processes of this job; each has one device.
    """

    def __init__(self, metrics: Path, *, num_devices: int) -> None:
        self._before = last_recorded(metrics)
        self._num_devices = num_devices
        self._begin_s = clock.monotonic()

    def record(self) -> dict[str, float]:
        """Return the metric, to be put into a step's record."""
        hours = self._num_devices * (clock.monotonic() - self._begin_s) / _HOUR_S
        return {"device_hours": round(self._before + hours, 7)}


def last_recorded(metrics: Path) -> float:
    """Return the newest figure in a file of records; 0 if there is none."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            found = _FIGURE.findall(file.read())
    except OSError:
        return 0.0
    try:
        return float(found[-1]) if found else 0.0
    except ValueError:
        return 0.0
