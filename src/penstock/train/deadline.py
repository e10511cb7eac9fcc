"""A deadline for stopping: who was asked to leave has so many seconds to save, or leaves without.

Schedulers kill what is still there some time after SIGTERM: Kubernetes and Slurm after 30 seconds, spot
machines after 30 to 120. A save that would be cut in half there is given up here, with words and an exit
code: a checkpoint without its index does not exist, so the one before is what the run resumes from.

The first rank to leave so is a lost peer to the others. They wait for their own time and leave likewise:
a failure of theirs would outrank the stop.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from penstock.core import clock
from penstock.launch.local import EXIT_STOPPED
from penstock.parallel.mesh import is_of_lost_peer

log = logging.getLogger(__name__)


def _end() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_STOPPED)


class Deadline(AbstractContextManager["Deadline"]):
    """Ends the process some time after a request to stop, unless the context is left before.

    Args:
        within_s: seconds from the request; 0: as long as it takes.
        end: ends the process.
    """

    def __init__(self, within_s: float, *, says: bool, end: Callable[[], None] = _end) -> None:
        self._within_s, self._says, self._end = within_s, says, end
        self._timer: threading.Timer | None = None

    def requested(self, at: float) -> None:
        """Say when this rank was asked to stop, or heard that another was; the first time counts.

        Args:
            at: by `clock.monotonic`.
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
                    "not saved within %g s of the request to stop (guard.stop_within_s): "
                    "the run resumes from the checkpoint before",
                    self._within_s,
                )
        finally:
            self._end()

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if self._timer is not None:
            if error is None or not is_of_lost_peer(error):
                self._timer.cancel()
            self._timer.join()
