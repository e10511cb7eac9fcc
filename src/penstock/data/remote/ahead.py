"""Threads that fetch ahead of use: a bounded number at work, hints that may be dropped, no word of errors.

What fails here fails again, loudly, when it is read. Threads end with their owner; what still waits when the
interpreter ends, or when its blob is gone, is dropped.
"""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol
from weakref import ReferenceType, ref

from penstock.core.errors import CorpusError

log = logging.getLogger(__name__)

_MOST_WAITING = 16_384  # a pool of 16 blocks is 16; what comes beyond is fetched when it is read


class Fetches(Protocol):
    """What can bring a range of its bytes."""

    def bring(self, start: int, stop: int) -> None:
        """Fetch bytes [start, stop) into the cache, exactly those."""


class Ahead:
    """The background threads of one storage."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="penstock-remote")
        self._waiting = 0
        self._lock = threading.Lock()

    def fetch(self, blob: Fetches, start: int, stop: int) -> bool:
        """Fetch a range of a blob some time soon; return whether that was taken on."""
        with self._lock:
            if self._waiting >= _MOST_WAITING:
                return False
            self._waiting += 1
        self._threads.submit(self._fetch, ref(blob), start, stop)
        return True

    def _fetch(self, blob_or_gone: ReferenceType[Fetches], start: int, stop: int) -> None:
        with self._lock:
            self._waiting -= 1
        blob = blob_or_gone()
        if blob is None or not threading.main_thread().is_alive():
            return
        try:
            blob.bring(start, stop)
        except CorpusError as error:
            log.debug("fetching ahead failed reason=%s", error)
