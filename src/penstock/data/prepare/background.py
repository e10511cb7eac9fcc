"""Background preparation: prepare a corpus in its own process while others read its finished parts.

The preparer ends with the process that started it. Its progress, or the reason of its failure, is in a status
file in the corpus's folder. The file is also its claim to the folder, renewed every second: of two preparers
on machines that share a file system (where locks may work on one machine only), the one whose claim was
overwritten ends.

Among the processes of a machine that read a corpus, the one that gets the lock starts the preparer, and the
preparer holds the lock until it ends. If that process ends, its preparer ends too, and the next process that
needs a part starts another, which continues the work.
"""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from penstock.core import clock, env
from penstock.core.errors import CorpusError, PenstockError, RunLocked
from penstock.core.files import MANIFEST_FILE
from penstock.core.log import EventLog
from penstock.core.signals import signal_name
from penstock.core.system_errors import in_words
from penstock.data.corpus.manifest import load_manifest
from penstock.data.prepare.inputs import Selection
from penstock.data.prepare.plan import PrepareConfig, Progress
from penstock.data.prepare.run import prepare

STATUS_FILE = "status.json"
"""Status file in the folder of a corpus that is being prepared."""
LOG_FILE = "prepare.log"
"""Output of the preparer, beside the status file; only if it printed anything."""
EXIT_FAILED, EXIT_YIELDED = 1, 3

_BEAT_S = 1.0
_STALE_S = 30.0
_NICENESS = 10  # training has priority


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationJob:
    """Arguments of the preparer process, passed as JSON on its command line."""

    parent: int
    """Process id of the parent; the preparer ends with it."""
    folder: str
    """Folder of the corpus."""
    directory: str
    """Folder of the input; the preparer's working directory, so that the plan contains no absolute path."""
    name: str
    """Name of the input within `directory`."""
    options: dict[str, str | int | None]
    """Options of PrepareConfig."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Status of a preparer, written to the status file."""

    owner: str
    """Host, process id and start time of the preparer."""
    host: str
    """Host of the preparer."""
    stage: str = "start"
    """Present stage of the work."""
    done_bytes: int = 0
    """Input bytes read."""
    total_bytes: int = 0
    """Bytes of all inputs."""
    tokens: int = 0
    """Tokens written."""
    error: str = ""
    """Reason of a failure, as a message for the user; empty: none."""


def read_status(folder: Path) -> Status | None:
    """Return the status of a folder's last preparer; None if the file is missing or incomplete."""
    try:
        return Status(**json.loads((folder / STATUS_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


class _Claim:
    """Claim to a folder: the status file, renewed by a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        host = socket.gethostname()
        self._status = Status(owner=f"{host}:{os.getpid()}:{clock.unix_seconds():.6f}", host=host)
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)

    def take(self) -> None:
        """Wait until no preparer of another machine is active, then claim the folder."""
        while self._is_foreign(read_status(self._folder)) and self._age() < _STALE_S:
            clock.sleep(_BEAT_S)
        self._write()
        if env.ranks().world_size > env.local_world_size():
            clock.sleep(2 * _BEAT_S)  # one of another machine may have started at the same moment
            self._check()
        self._beating.start()

    def show(self, progress: Progress) -> None:
        """Record the progress; it is written with the next renewal."""
        self._status = replace(
            self._status,
            stage=progress.stage,
            done_bytes=progress.done_bytes,
            total_bytes=progress.total_bytes,
            tokens=progress.tokens,
        )

    def end(self, *, error: str = "") -> None:
        """Stop renewing; leave the error in the status file, or remove the file."""
        self._ended.set()
        if self._beating.is_alive():
            self._beating.join()
        if error:
            self._status = replace(self._status, error=error)
            self._write()
        else:
            (self._folder / STATUS_FILE).unlink(missing_ok=True)
            printed = self._folder / LOG_FILE
            if printed.is_file() and not printed.stat().st_size:
                printed.unlink()

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            self._check()
            try:
                self._write()
            except OSError:  # a full disk: the preparation itself will raise
                continue

    def _check(self) -> None:
        if self._is_foreign(read_status(self._folder)):
            os._exit(EXIT_YIELDED)

    def _is_foreign(self, status: Status | None) -> bool:
        return status is not None and not status.error and status.host != self._status.host

    def _age(self) -> float:
        """Return the seconds since the last renewal, by the file system's clock."""
        probe = self._folder / f".{self._status.owner}.tmp"
        try:
            probe.write_bytes(b"")
            return probe.stat().st_mtime - (self._folder / STATUS_FILE).stat().st_mtime
        except FileNotFoundError:  # the other preparer has just ended
            return _STALE_S
        finally:
            probe.unlink(missing_ok=True)

    def _write(self) -> None:
        # Not flushed to disk: after a power failure no preparer is active, whatever the file says.
        path = self._folder / STATUS_FILE
        temporary = path.with_name(f".{self._status.owner}.status.tmp")
        temporary.write_text(json.dumps(asdict(self._status)) + "\n")
        temporary.replace(path)


def main(argv: Sequence[str]) -> int:
    """Run the job; on failure, print the reason and leave it in the status file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    job = PreparationJob(**json.loads(argv[1]))
    threading.Thread(target=_end_with, args=(job.parent,), daemon=True).start()
    os.nice(_NICENESS)
    folder, claim = Path(job.folder), _Claim(Path(job.folder))
    try:
        claim.take()
        _prepare(job, folder, claim)
    except (PenstockError, OSError) as error:
        return _failed(claim, said=_said(error))
    except Exception as error:  # a defect: whoever reads the status file must be told
        traceback.print_exc()
        return _failed(
            claim, said=f"{type(error).__name__}: {str(error).removesuffix('.')}. See {folder / LOG_FILE}"
        )
    claim.end()
    return 0


def _prepare(job: PreparationJob, folder: Path, claim: _Claim) -> None:
    options = {**job.options, "tokenizer": Path(str(job.options["tokenizer"]))}
    config = PrepareConfig(**options, stream=True)  # type: ignore[arg-type]
    os.chdir(job.directory)
    while True:
        try:
            prepare([job.name], folder, config=config, selection=Selection(), on_progress=claim.show)
            return
        except RunLocked:  # the user prepares it by hand: wait for the result
            clock.sleep(_BEAT_S)


def _failed(claim: _Claim, *, said: str) -> int:
    sys.stdout.write(said)  # a pipe to the parent
    sys.stdout.flush()
    try:
        claim.end(error=said)
    except OSError:  # a full disk: the parent got the message through the pipe above
        traceback.print_exc()
    return EXIT_FAILED


def _said(error: PenstockError | OSError) -> str:
    return in_words(error) if isinstance(error, OSError) else str(error)


def _end_with(parent: int) -> None:
    """End this process when its parent has ended; finished steps are on disk, others are repeated later."""
    while os.getppid() == parent:
        clock.sleep(0.2)
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main(sys.argv))


log = EventLog(__name__)

LOCK_FILE = ".preparing"

_GRACE_S = 10.0
_REPORT_S = 15.0
_ON_REQUEST = (-signal.SIGTERM, -signal.SIGINT, EXIT_YIELDED)
_MODULE = "penstock.data.prepare.background"


class Preparation:
    """Running preparation of a corpus; it continues as long as this object lives. Thread-safe.

    Args:
        what: name of the corpus, for messages.
        folder: folder of the corpus.
        job: arguments of the preparer.
    """

    def __init__(self, what: str, folder: Path, job: PreparationJob) -> None:
        self.folder = folder
        self._what, self._job = what, job
        self._mutex = threading.Lock()
        self._children: list[subprocess.Popen[str]] = []
        self._saw_another = False
        self._reported = clock.monotonic()
        weakref.finalize(self, _end, self._children, os.getpid())

    def keep_going(self) -> None:
        """Ensure that the corpus is finished or is being prepared by some process.

        Raises:
            CorpusError: the preparation failed; the message contains the reason.
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
        """Raise the error of a preparer that ended by itself."""
        said, code = child.communicate()[0].strip(), child.returncode
        if code in (0, *_ON_REQUEST):
            return
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        log_file = self.folder / LOG_FILE
        more = f"; see {log_file}" if log_file.is_file() else ""
        raise self._failed(said or f"its process {how}{more}")

    def _start(self) -> None:
        """Start a preparer, unless another process runs one."""
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
            log.info(
                "preparing",
                "Preparing {corpus} in {path} (process {pid}); training reads the finished parts",
                corpus=self._what,
                path=self.folder,
                pid=child.pid,
            )
        finally:
            os.close(held)  # the preparer inherited it and keeps the lock

    def _report(self) -> None:
        status, now = read_status(self.folder), clock.monotonic()
        if not self._children or status is None or now < self._reported + _REPORT_S:
            return
        self._reported = now
        log.info(
            "preparing",
            "Preparing {corpus}: {done_bytes:bytes} of {total_bytes:bytes} are read, {tokens:si} tokens",
            corpus=self._what,
            done_bytes=status.done_bytes,
            total_bytes=status.total_bytes,
            tokens=status.tokens,
        )

    def _failed(self, cause: str) -> CorpusError:
        return CorpusError(
            f"Corpus {self._what} could not be prepared: {cause}",
            fix=f"Correct the cause and start again: finished work is kept in {self.folder}. Options "
            "such as --max-errors 2 are written after the path here: ,max_errors=2.",
        )


def is_finished(folder: Path) -> bool:
    """Return True if a folder contains a finished corpus."""
    return (folder / MANIFEST_FILE).is_file() and load_manifest(folder).streamed_parts != 0


def _lock(folder: Path) -> int | None:
    """Return a descriptor that holds the folder's lock; None if another process holds it."""
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
                f"The file system of {folder} does not support locks ({error.strerror})",
                fix="Choose a folder on another one: text:PATH,...,cache=DIR.",
            ) from None
        raise
    return held


def _end(children: "list[subprocess.Popen[str]]", owner: int) -> None:
    """End the preparer of this process; in a forked process the copy of this object leaves it alone."""
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
