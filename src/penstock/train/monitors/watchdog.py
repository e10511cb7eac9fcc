"""Watchdog: detects a hang; each rank writes its state, one reports, all exit.

A thread of each rank watches the clock. If no step was finished for long enough, it writes the rank's
activity, the call stacks of all threads and the flight recorder's last collectives to the run's folder
`hangs`, waits a little for the other ranks' files, and exits the process, because a hanging collective cannot
be left in any other way. Training resumes from the last checkpoint.
"""

import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

from penstock.core import clock
from penstock.core.errors import PenstockError
from penstock.core.files import write_json
from penstock.core.log import EventLog
from penstock.obs.hang_report import LastWords, diagnose, read_words
from penstock.obs.metric_names import HANGS_FOLDER
from penstock.parallel.ethernet.all_to_all import MESSAGES
from penstock.parallel.flight_recorder import last_collectives

log = EventLog(__name__)

EXIT_HUNG = 1
_FIRST_STEP = 4.0  # factor of the time limit: the first step may compile
_MAX_LINGER_S = 20.0
_KEPT_COLLECTIVES = 32
_LOOK_EVERY_S = 0.1


def _end() -> None:
    logging.shutdown()
    sys.stderr.flush()
    os._exit(EXIT_HUNG)


class Watchdog(AbstractContextManager["Watchdog"]):
    """Watches one rank within its context.

    Args:
        folder: folder of the run.
        hang_s: seconds without a finished step.
        end: exits the process.
    """

    def __init__(
        self, folder: Path, *, rank: int, world_size: int, hang_s: float, end: Callable[[], None] = _end
    ) -> None:
        self._folder, self._rank, self._world_size = folder / HANGS_FOLDER, rank, world_size
        self._hang_s, self._end = hang_s, end
        self._since, self._patience_s = clock.monotonic(), _FIRST_STEP * hang_s
        self._step, self._doing = 0, "start"
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="penstock-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()

    def doing(self, what: str, *, step: int) -> None:
        """Record the rank's activity; restarts the timeout."""
        if what == "step" and self._doing != "start":
            self._patience_s = self._hang_s  # the first step is complete
        self._step, self._doing = step, what
        self._since = clock.monotonic()

    def _watch(self) -> None:
        while True:
            left_s = max(self._since + self._patience_s - clock.monotonic(), 0.0)
            asked_s = min(left_s, self._hang_s)  # the longer limit of the first step may end meanwhile
            before = clock.monotonic()
            if self._left.wait(asked_s):
                return
            overslept_s = clock.monotonic() - before - asked_s
            waited_s = clock.monotonic() - self._since
            if overslept_s > self._patience_s / 2:  # this process itself was suspended, and continues
                self._since = clock.monotonic()
            elif waited_s >= self._patience_s:
                self._give_up(waited_s)
                return

    def _give_up(self, waited_s: float) -> None:
        try:
            words = self._words()
            record = {**asdict(words), "collectives": last_collectives(_KEPT_COLLECTIVES)}
            self._folder.mkdir(parents=True, exist_ok=True)
            write_json(self._folder / f"rank-{self._rank:05d}.json", record)
            everyone = self._wait_for_others(words)
            if min(each.rank for each in everyone) == self._rank:
                text = diagnose(everyone, world_size=self._world_size, waited_s=waited_s)
                log.error(
                    "hang",
                    "{diagnosis} Every rank's calls and collectives: {path}",
                    diagnosis=text,
                    path=self._folder,
                )
        finally:
            self._end()

    def _words(self) -> LastWords:
        recent = last_collectives(1)
        recorded = int(str(recent[-1]["record_id"])) + 1 if recent else 0
        last = str(recent[-1]["profiling_name"]) if recent else ""
        return LastWords(
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            at=clock.unix_seconds(),
            step=self._step,
            doing=self._doing,
            num_collectives=recorded + MESSAGES.num_begun,
            last_collective=MESSAGES.waited_for or last,
            stacks=_stacks(),
        )

    def _wait_for_others(self, own: LastWords) -> Sequence[LastWords]:
        """Return the states of all ranks that write one soon: each writes when its own limit ends."""
        linger_s = min(self._hang_s / 2, _MAX_LINGER_S)
        deadline = clock.monotonic() + linger_s
        while True:
            found = [own, *self._fresh(own)]
            if len(found) == self._world_size or clock.monotonic() > deadline:
                return found
            clock.sleep(_LOOK_EVERY_S)

    def _fresh(self, own: LastWords) -> list[LastWords]:
        """Return the states that other ranks wrote for this hang; files of earlier hangs are ignored."""
        found = []
        for path in self._folder.glob("rank-*.json"):
            try:
                words = read_words(path.read_bytes())
            except (OSError, PenstockError):  # of an earlier hang, under another version
                continue
            if (
                words.rank != own.rank
                and words.rank < self._world_size
                and abs(words.at - own.at) < self._hang_s
            ):
                found.append(words)
        return found


def _stacks() -> dict[str, tuple[str, ...]]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    return {
        names.get(ident, str(ident)): tuple(
            f"{call.name} ({call.filename}:{call.lineno})" for call in traceback.extract_stack(frame)
        )
        for ident, frame in sys._current_frames().items()
        if ident != own
    }
