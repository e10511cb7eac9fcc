"""Rows of the table of runs; an object store that is slow holds up nothing but its own runs."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from urllib.parse import urlsplit

from penstock.obs.run_data.discover import FoundRun
from penstock.obs.run_data.run_row import RunRow, Summaries, unread_row

_REQUESTS_AT_ONCE = 16
"""To one object store."""


class TableRows:
    """Rows of runs. Thread-safe.

    Those in local folders are read while the caller waits, one caller after the other. Those in object stores
    are read by threads, each by one at a time. Who asks waits for them as long as it likes; of a run that is
    still being read then, it gets the row that was read last.
    """

    def __init__(self, summaries: Summaries) -> None:
        self._summaries = summaries
        self._local = Lock()
        self._lock = Lock()  # of what follows; nothing is read while it is held
        self._reading: dict[str, Future[None]] = {}
        self._last: dict[str, RunRow] = {}
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def of(self, runs: Sequence[FoundRun], *, most_s: float | None) -> list[RunRow]:
        """Return the rows of some runs, in their order.

        Args:
            most_s: seconds to wait for object stores; None: until they have answered or failed.
        """
        begun = [self._begin(run) for run in runs if run.files.is_stored]
        with self._local:
            local = {run.id: self._summaries.row(run) for run in runs if not run.files.is_stored}
        for done in wait(begun, most_s).done:
            done.result()  # raises what reading raised
        with self._lock:
            return [local.get(run.id) or self._last.get(run.id) or unread_row(run) for run in runs]

    def forget(self, runs: Sequence[FoundRun]) -> None:
        """Forget all runs but these."""
        ids = [run.id for run in runs]
        with self._local:
            self._summaries.forget(ids)
        with self._lock:
            for gone in self._last.keys() - set(ids):
                del self._last[gone]

    def close(self) -> None:
        """End the threads once they have read what they are reading."""
        with self._lock:
            for pool in self._pools.values():
                pool.shutdown(wait=False, cancel_futures=True)
            self._pools.clear()

    def _begin(self, run: FoundRun) -> Future[None]:
        """Read a run's row in a thread, unless one is reading it."""
        with self._lock:
            if run.id not in self._reading:
                store = urlsplit(run.files.location).netloc
                if store not in self._pools:
                    self._pools[store] = ThreadPoolExecutor(_REQUESTS_AT_ONCE, "console-rows")
                self._reading[run.id] = self._pools[store].submit(self._read, run)
            return self._reading[run.id]

    def _read(self, run: FoundRun) -> None:
        try:
            row = self._summaries.row(run)
            with self._lock:
                self._last[run.id] = row
        finally:
            with self._lock:
                del self._reading[run.id]
