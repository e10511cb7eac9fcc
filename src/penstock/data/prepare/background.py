"""Prepare a corpus in a process of its own while others read it: the program that `text:` corpora start.

It lives as long as the process that started it, and no longer. How far it is, or why it failed, stands in a
status file in the corpus's folder, which is also its claim to the folder: it is renewed every second, and of
two preparers on machines that share a file system (where locks may hold on one machine only) the one
whose claim was overwritten ends.
"""

import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from penstock.core import clock, env
from penstock.core.errors import PenstockError, RunLocked
from penstock.data.prepare.inputs import Selection
from penstock.data.prepare.plan import PrepareConfig
from penstock.data.prepare.progress import Progress
from penstock.data.prepare.run import prepare

STATUS_FILE = "status.json"
"""In the folder of a corpus that is being prepared in the background."""
LOG_FILE = "prepare.log"
"""Beside it: what the process printed; there only if it did."""
EXIT_FAILED, EXIT_YIELDED = 1, 3

_BEAT_S = 1.0
_STALE_S = 30.0
_NICENESS = 10  # training goes first


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the process is told, as JSON on its command line."""

    parent: int
    """Process id of who started it, and with whom it ends."""
    folder: str
    """Of the corpus."""
    directory: str
    """Where the input lies; the process goes there, so that the plan does not depend on where that is."""
    name: str
    """Of the input in its directory."""
    options: dict[str, str | int | None]
    """Of PrepareConfig."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a preparer writes down while it works."""

    owner: str
    """Machine, process and start of the preparer."""
    host: str
    """Its machine."""
    stage: str = "start"
    """What is being done."""
    done_bytes: int = 0
    """Input bytes read."""
    total_bytes: int = 0
    """Of all inputs."""
    tokens: int = 0
    """Tokens made."""
    error: str = ""
    """Why it failed, in words for the user."""


def read_status(folder: Path) -> Status | None:
    """Return what the last preparer of a folder wrote down; None where there is nothing, or half a file."""
    try:
        return Status(**json.loads((folder / STATUS_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


class _Claim:
    """The status file, renewed by a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        host = socket.gethostname()
        self._status = Status(owner=f"{host}:{os.getpid()}:{clock.unix_seconds():.6f}", host=host)
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)

    def take(self) -> None:
        """Wait until no other machine's preparer is at work, then claim the folder."""
        while self._is_foreign(read_status(self._folder)) and self._age() < _STALE_S:
            clock.sleep(_BEAT_S)
        self._write()
        if env.ranks().world_size > env.local_world_size():
            clock.sleep(2 * _BEAT_S)  # another machine's may have begun at the same moment
            self._check()
        self._beating.start()

    def show(self, progress: Progress) -> None:
        """Take a report; it is written with the next beat."""
        self._status = replace(
            self._status,
            stage=progress.stage,
            done_bytes=progress.done_bytes,
            total_bytes=progress.total_bytes,
            tokens=progress.tokens,
        )

    def end(self, *, error: str = "") -> None:
        """Leave the error behind, or nothing."""
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
            except OSError:  # a full disk: the preparation itself will say so
                continue

    def _check(self) -> None:
        if self._is_foreign(read_status(self._folder)):
            os._exit(EXIT_YIELDED)

    def _is_foreign(self, status: Status | None) -> bool:
        return status is not None and not status.error and status.host != self._status.host

    def _age(self) -> float:
        """Return the seconds since the last beat, by the file system's own clock."""
        probe = self._folder / f".{self._status.owner}.tmp"
        try:
            probe.write_bytes(b"")
            return probe.stat().st_mtime - (self._folder / STATUS_FILE).stat().st_mtime
        except FileNotFoundError:  # the other one has just ended
            return _STALE_S
        finally:
            probe.unlink(missing_ok=True)

    def _write(self) -> None:
        # Not flushed to disk: after a power cut nobody is at work, whatever it says.
        path = self._folder / STATUS_FILE
        temporary = path.with_name(f".{self._status.owner}.status.tmp")
        temporary.write_text(json.dumps(asdict(self._status)) + "\n")
        temporary.replace(path)


def main(argv: Sequence[str]) -> int:
    """Do the job; the reason of a failure is printed and left in the status file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started this
    job = Job(**json.loads(argv[1]))
    threading.Thread(target=_end_with, args=(job.parent,), daemon=True).start()
    os.nice(_NICENESS)
    folder, claim = Path(job.folder), _Claim(Path(job.folder))
    try:
        claim.take()
        _prepare(job, folder, claim)
    except (PenstockError, OSError) as error:
        return _failed(claim, said=_in_words(error))
    except Exception as error:
        traceback.print_exc()
        return _failed(claim, said=f"{type(error).__name__}: {error}. See {folder / LOG_FILE}")
    claim.end()
    return 0


def _prepare(job: Job, folder: Path, claim: _Claim) -> None:
    options = {**job.options, "tokenizer": Path(str(job.options["tokenizer"]))}
    config = PrepareConfig(**options, stream=True)  # type: ignore[arg-type]
    os.chdir(job.directory)
    while True:
        try:
            prepare([job.name], folder, config=config, selection=Selection(), on_progress=claim.show)
            return
        except RunLocked:  # somebody prepares it by hand: wait for what becomes of it
            clock.sleep(_BEAT_S)


def _failed(claim: _Claim, *, said: str) -> int:
    sys.stdout.write(said)  # a pipe to who started this
    sys.stdout.flush()
    try:
        claim.end(error=said)
    except OSError:  # a full disk: who started this has the message from the line above
        traceback.print_exc()
    return EXIT_FAILED


def _in_words(error: PenstockError | OSError) -> str:
    if isinstance(error, PenstockError):
        return str(error)
    where = f": {error.filename}" if error.filename else ""
    return f"{os.strerror(error.errno) if error.errno else error}{where}"


def _end_with(parent: int) -> None:
    """End this process when its parent has ended; every step so far is on disk, or is done again."""
    while os.getppid() == parent:
        clock.sleep(0.2)
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
