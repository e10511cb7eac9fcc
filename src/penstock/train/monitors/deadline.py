"""Deadline for stopping: a process that cannot save in time exits without saving.

Schedulers kill a process some time after SIGTERM: Kubernetes and Slurm after 30 seconds, spot machines after
30 to 120. A save that would be interrupted is given up here, with a message and an exit code: a checkpoint
without its index does not exist, so the run resumes from the one before.

To the other ranks, the first rank to exit like this is a lost peer. They wait for their own deadline and exit
likewise: a failure of theirs would take precedence over the stop.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from penstock.core import clock
from penstock.core.log import EventLog
from penstock.launch.local import EXIT_STOPPED
from penstock.parallel.mesh import is_of_lost_peer

log = EventLog(__name__)


def _end() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_STOPPED)


class Deadline(AbstractContextManager["Deadline"]):
    """Exits the process some time after a request to stop, unless the context is left before.

    Args:
        within_s: seconds from the request; 0: no limit.
        end: exits the process.
    """

    def __init__(self, within_s: float, *, says: bool, end: Callable[[], None] = _end) -> None:
        self._within_s, self._says, self._end = within_s, says, end
        self._timer: threading.Timer | None = None

    def requested(self, at: float) -> None:
        """Start the timer, when this rank or another was asked to stop; only the first call counts.

        Args:
            at: time of the request, by `clock.monotonic`.
        """
        if self._within_s and self._timer is None:
            left_s = max(at + self._within_s - clock.monotonic(), 0.0)
            self._timer = threading.Timer(left_s, self._give_up)
            self._timer.daemon = True
            self._timer.start()

    def _give_up(self) -> None:
        try:
            if self._says:
                log.warning(
                    "save_late",
                    "The run was not saved within {within_s:g} s of the request to stop "
                    "(guard.stop_within_s): it resumes from the checkpoint before",
                    within_s=self._within_s,
                )
        finally:
            self._end()

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if self._timer is not None:
            if error is None or not is_of_lost_peer(error):
                self._timer.cancel()
            self._timer.join()
