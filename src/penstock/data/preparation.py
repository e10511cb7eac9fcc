"""A corpus that is being prepared by a process of its own, as the processes that read it see it.

Of all processes of a machine that read a corpus, one starts the preparer: the one that gets the lock, which
the preparer then holds until it ends. If that process goes, its preparer ends with it, and the next one
that needs a part starts another, which goes on where the first one was.
"""

import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import asdict
from pathlib import Path

from penstock.core import clock
from penstock.core.errors import CorpusError
from penstock.core.units import mib, si
from penstock.data.manifest import FILE, load_manifest
from penstock.data.prepare.background import EXIT_YIELDED, LOG_FILE, Job, read_status

log = logging.getLogger(__name__)

LOCK_FILE = ".preparing"

_GRACE_S = 10.0
_REPORT_S = 15.0
_ON_REQUEST = (-signal.SIGTERM, -signal.SIGINT, EXIT_YIELDED)
_MODULE = "penstock.data.prepare.background"


class Preparation:
    """Keeps a corpus's preparation going as long as this object lives. Thread-safe.

    Args:
        what: the corpus, for messages.
        folder: where it is prepared.
        job: what the preparer is to do.
    """

    def __init__(self, what: str, folder: Path, job: Job) -> None:
        self.folder = folder
        self._what, self._job = what, job
        self._mutex = threading.Lock()
        self._children: list[subprocess.Popen[str]] = []
        self._saw_another = False
        self._reported = clock.monotonic()
        weakref.finalize(self, _end, self._children, os.getpid())

    def keep_going(self) -> None:
        """See that the corpus is being prepared, by whomever, or is finished.

        Raises:
            CorpusError: the preparation failed; the message says why.
        """
        with self._mutex:
            if self._children:
                if self._children[0].poll() is None:
                    self._report()
                    return
                self._take_leave(self._children.pop())
            if not is_finished(self.folder):
                self._start()

    def _take_leave(self, child: "subprocess.Popen[str]") -> None:
        """Raise what a preparer that ended by itself died of."""
        said, code = child.communicate()[0].strip(), child.returncode
        if code in (0, *_ON_REQUEST):
            return
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        log_file = self.folder / LOG_FILE
        more = f"; see {log_file}" if log_file.is_file() else ""
        raise self._failed(said or f"its process {how}{more}")

    def _start(self) -> None:
        """Start a preparer, unless another process has one."""
        held = _lock(self.folder)
        if held is None:
            self._saw_another = True
            self._report()
            return
        try:
            if is_finished(self.folder):
                return
            status = read_status(self.folder)
            if self._saw_another and status is not None and status.error:
                raise self._failed(status.error)
            with (self.folder / LOG_FILE).open("ab") as printed:
                child = subprocess.Popen(
                    [sys.executable, "-m", _MODULE, json.dumps(asdict(self._job))],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=printed,
                    text=True,
                    pass_fds=(held,),
                )
            self._children.append(child)
            log.info("preparing corpus=%s folder=%s pid=%d", self._what, self.folder, child.pid)
        finally:
            os.close(held)  # a preparer has it too, and keeps the lock

    def _report(self) -> None:
        status, now = read_status(self.folder), clock.monotonic()
        if not self._children or status is None or now < self._reported + _REPORT_S:
            return
        self._reported = now
        log.info(
            "preparing corpus=%s read=%s of=%s tokens=%s",
            self._what, mib(status.done_bytes), mib(status.total_bytes), si(status.tokens),
        )  # fmt: skip

    def _failed(self, cause: str) -> CorpusError:
        return CorpusError(
            f"Corpus {self._what} could not be prepared: {cause}",
            fix=f"Put that right and start again: what was done so far is kept in {self.folder}. Options "
            "such as --max-errors 2 are written after the path here: ,max_errors=2.",
        )


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a corpus that will not grow by itself any more."""
    return (folder / FILE).is_file() and load_manifest(folder).streamed_parts != 0


def _lock(folder: Path) -> int | None:
    """Return a descriptor that holds the folder's lock, or None where another process does."""
    held = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return None
    except OSError as error:
        os.close(held)
        if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise CorpusError(
                f"The file system of {folder} has no locks ({error.strerror})",
                fix="Choose a folder on another one: text:PATH,...,cache=DIR.",
            ) from None
        raise
    return held


def _end(children: "list[subprocess.Popen[str]]", owner: int) -> None:
    """End the preparer of this process; a copy of this object in a forked process leaves it alone."""
    if os.getpid() != owner:
        return
    while children:
        child = children.pop()
        child.terminate()
        try:
            child.communicate(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
