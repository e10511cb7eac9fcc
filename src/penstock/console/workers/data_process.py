"""The process that answers questions about runs: `penstock data inspect`.

It is started by the first question and ended after a time without one. Questions of several threads are open
at once; each comes back with its number.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Lock, Thread, Timer
from typing import IO, Any

from penstock.core.errors import PenstockError

_IDLE_S = 300.0
_PATIENCE_S = 900.0
"""Seconds for an answer: corpora are opened, some of them in object stores."""

Answer = dict[str, Any]  # Any: JSON values


class QuestionRefused(PenstockError):
    """A worker process refused a question, or could not answer it.

    Args:
        status: HTTP status to pass on.
    """

    def __init__(self, said: str, status: int) -> None:
        super().__init__(said)
        self.status = status


def start() -> "subprocess.Popen[str]":
    """Start the process. Ctrl-C on the console's terminal does not reach it: it ends with its input."""
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "data", "inspect"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    )


class DataProcess:
    """Answers questions about runs. Thread-safe.

    Args:
        idle_s: seconds without a question after which the process is ended.
    """

    def __init__(self, *, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._lock = Lock()
        self._running: _Running | None = None
        self._timer: Timer | None = None
        self._is_closed = False

    def ask(self, question: str, run: Path, **words: Any) -> Answer:  # Any: JSON values
        """Return the answer to a question about a run (train/inspect/run_questions.py has all of them).

        Raises:
            QuestionRefused: the question was refused, or the process ended.
        """
        with self._lock:
            if self._is_closed:
                raise QuestionRefused("The console is ending.", 503)
            if self._timer is not None:
                self._timer.cancel()
            if self._running is not None and not self._running.is_alive:
                self._end()
            if self._running is None:
                self._running = _Running(start(), self._rest)
            answer = self._running.ask({"ask": question, "run": str(run), **words})
        try:
            found = answer.result(_PATIENCE_S)
        except TimeoutError:
            raise QuestionRefused(f"No answer within {_PATIENCE_S:,.0f} s. Ask again later.", 503) from None
        if "error" in found:
            raise QuestionRefused(found["error"], found["status"])
        told: Answer = found["answer"]
        return told

    def close(self) -> None:
        """End the process; no other one is started."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _rest(self) -> None:
        """End the process after a while, unless somebody asks."""
        with self._lock:
            if self._running is None or self._running.num_open or self._is_closed:
                return
            if self._timer is not None:
                self._timer.cancel()
            self._timer = Timer(self._idle_s, self._end_idle)
            self._timer.daemon = True
            self._timer.start()

    def _end_idle(self) -> None:
        with self._lock:
            if self._running is not None and not self._running.num_open:
                self._end()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._running is not None:
            self._running.end()
        self._running = None


class _Running:
    """A process and the questions that it has not answered.

    Args:
        on_rest: called when it has answered all.
    """

    def __init__(self, process: "subprocess.Popen[str]", on_rest: Callable[[], None]) -> None:
        self._process, self._on_rest = process, on_rest
        self._open: dict[int, Future[Answer]] = {}
        self._numbers = count(1)
        self._lock = Lock()
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin: IO[str] = process.stdin
        self._stdout: IO[str] = process.stdout
        self._has_failed = False
        Thread(target=self._read, name="console-data", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None and not self._has_failed

    @property
    def num_open(self) -> int:
        return len(self._open)

    def ask(self, question: Answer) -> "Future[Answer]":
        number, answer = next(self._numbers), Future[Answer]()
        with self._lock:
            self._open[number] = answer
        with suppress(OSError):  # it ends in this moment, and the reader sees that
            self._stdin.write(json.dumps({"id": number, **question}) + "\n")
            self._stdin.flush()
        if self._has_failed:  # before the question was known to the reader
            self._fail()
        return answer

    def end(self) -> None:
        """End it; what it is computing is lost.

        The reader sees the end of the output and is not waited for: it may be about to call `on_rest`, which
        takes the lock that the caller holds.
        """
        with suppress(OSError):
            self._stdin.close()
        self._process.terminate()
        self._process.wait()

    def _read(self) -> None:
        with self._stdout, suppress(ValueError, KeyError):  # a killed process cuts its answer short
            for line in self._stdout:
                reply = json.loads(line)
                with self._lock:
                    answer = self._open.pop(reply["id"], None)
                if answer is not None:
                    answer.set_result(reply)
                if not self._open:
                    self._on_rest()
        self._fail()

    def _fail(self) -> None:
        with self._lock:
            self._has_failed, failed, self._open = True, self._open, {}
        for answer in failed.values():
            answer.set_result({"error": "The process that reads runs has ended. Ask again.", "status": 503})
