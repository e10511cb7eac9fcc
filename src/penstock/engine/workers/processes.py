"""Worker processes of an engine: start them, send them work, notice when one dies.

A rank is a process (`python -m penstock.engine.workers.worker`) with one pipe to the first rank. The pipe
carries what to open, then each step's batch; tensors are exchanged among the ranks
(model_runner/collectives.py). The pipe also shows the death of either side at once and in any state, because
the kernel closes it. So a rank that waits for work needs no heartbeat and may wait for days, and none
outlives the first.

Workers ignore Ctrl-C and SIGTERM, which terminals and supervisors send to the whole process group: the first
rank decides when running requests are done.
"""

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from penstock.core import clock
from penstock.core.errors import RunnerLost
from penstock.core.log import EventLog
from penstock.core.signals import signal_name

log = EventLog(__name__)

STEP, COMMAND = b"s", b"c"
"""Message types of the first rank: a batch, or JSON."""

_SEND_LIMIT_S = 60
"""Time limit in seconds to send to a rank, which reads when it is idle."""

_PATIENCE_S = 5.0
"""Time in seconds for a rank to exit after it was told to, or after another one died."""


@dataclass(slots=True)
class _Rank:
    number: int
    process: "subprocess.Popen[bytes]"
    pipe: Connection
    said: str | None = None


@dataclass(slots=True)
class RankProcesses:
    """Worker processes (ranks from 1 on); `start` makes them, `close` ends them."""

    folder: Path
    """Folder of the rendezvous file; only this user may enter it."""
    ranks: list[_Rank] = field(default_factory=list)
    on_lost: Callable[[], None] = lambda: None
    """Called once, from another thread, when a rank dies unexpectedly."""
    lost: RunnerLost | None = None
    _watcher: threading.Thread | None = None
    _wake: tuple[Connection, Connection] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def start(cls, jobs: Mapping[int, Mapping[str, Any]]) -> Self:  # Any: JSON
        """Start one process per rank; `answered` waits until they have finished their job.

        Args:
            jobs: rank -> its first message; "meeting" is added.
        """
        made = cls(Path(tempfile.mkdtemp(prefix="penstock-ranks-")))
        try:
            for number, job in jobs.items():
                made.ranks.append(_start(number, {**job, "meeting": str(made.meeting)}))
        except BaseException:  # Ctrl-C too must leave no process behind
            made.close()
            raise
        return made

    @property
    def meeting(self) -> Path:
        """Rendezvous file of the ranks."""
        return self.folder / "meeting"

    def answered(self) -> None:
        """Wait until every rank has completed its last message.

        Raises:
            RunnerLost: a rank failed.
        """
        waiting = {rank.pipe: rank for rank in self.ranks}
        while waiting:
            for pipe in wait(list(waiting)):
                assert isinstance(pipe, Connection)
                if not self._heard(waiting.pop(pipe)):
                    raise self.explain(None)

    def tell(self, **command: Any) -> None:  # Any: JSON
        """Send a command to every rank."""
        self._send(COMMAND + json.dumps(command).encode())

    def step(self, batch: bytes) -> None:
        """Send a step's batch to every rank."""
        self._send(STEP + batch)

    def _send(self, message: bytes) -> None:
        for rank in self.ranks:
            try:
                rank.pipe.send_bytes(message)
            except OSError:
                raise self.explain(None) from None

    def watch(self) -> None:
        """Start the thread that notices when a rank dies."""
        self._wake = Pipe(duplex=False)
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        assert self._wake is not None
        pipes = {rank.pipe: rank for rank in self.ranks}
        while True:
            for ready in wait([self._wake[0], *pipes]):
                if ready is self._wake[0]:
                    return
                assert isinstance(ready, Connection)
                if not self._heard(pipes[ready]) or pipes[ready].said is not None:
                    self.explain(None)
                    self.on_lost()
                    return

    def _heard(self, rank: _Rank) -> bool:
        """Read a rank's reply; return False if it failed or died."""
        try:
            answer = json.loads(rank.pipe.recv_bytes())
        except (EOFError, OSError, ValueError):
            return False
        rank.said = answer.get("error")
        return rank.said is None

    def explain(self, error: BaseException | None) -> RunnerLost:
        """Return the error why no step can be computed, the same each time.

        Args:
            error: exception of the first rank, if that is how the loss was noticed.
        """
        with self._lock:
            if self.lost is None:
                self.lost = RunnerLost(
                    f"The engine's ranks cannot continue: {self._cause(error)}",
                    fix="Start the engine again; the log messages above say more.",
                )
                log.error("ranks_lost", "{cause}", cause=self.lost)
            return self.lost

    def _cause(self, error: BaseException | None) -> str:
        """Wait for ranks that lost a peer to exit, then distinguish killed ranks from hanging ones."""
        until = clock.monotonic() + _PATIENCE_S
        gone = [rank for rank in self.ranks if _ended(rank, until - clock.monotonic())]
        for rank in gone:
            while rank.said is None and rank.pipe.poll() and self._heard(rank):
                pass
        codes = {rank.number: rank.process.returncode for rank in gone}
        killed = [f"rank {n} was killed by {signal_name(-code)}" for n, code in codes.items() if code < 0]
        said = [f"rank {rank.number} failed: {rank.said}" for rank in gone if rank.said]
        hang = [f"rank {rank.number} does not answer" for rank in self.ranks if rank not in gone]
        ended = [f"rank {n} ended with code {code}" for n, code in codes.items()]
        met = [] if error is None else [f"rank 0 raised {type(error).__name__}: {error}"]
        return "; ".join(killed or said or hang or ended or met)

    def close(self) -> None:
        """Stop the ranks and remove their folder. Idempotent."""
        if self._watcher is not None and self._wake is not None:
            self._wake[1].close()  # wakes the watcher
            self._watcher.join()
            self._wake[0].close()
        self._watcher = self._wake = None
        for rank in self.ranks:
            rank.pipe.close()
        until = clock.monotonic() + (_PATIENCE_S if self.lost is None else 0.0)
        for rank in self.ranks:
            if not _ended(rank, until - clock.monotonic()):
                rank.process.kill()
                rank.process.wait()
        self.ranks.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


def _start(number: int, job: Mapping[str, Any]) -> _Rank:
    ours, theirs = Pipe()
    with socket.socket(fileno=os.dup(ours.fileno())) as line:  # a hanging rank does not read
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_LIMIT_S, 0))
    with theirs:
        # -P: modules of the current folder must not be imported
        command = [sys.executable, "-P", "-m", "penstock.engine.workers.worker", str(theirs.fileno())]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
    rank = _Rank(number, process, ours)
    ours.send_bytes(json.dumps({**job, "rank": number}, default=str).encode())
    return rank


def _ended(rank: _Rank, patience_s: float) -> bool:
    try:
        rank.process.wait(max(0.0, patience_s))
    except subprocess.TimeoutExpired:
        return False
    return True
