"""Commands of the demo: printed as a user types them, then run."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.core import clock
from penstock.core.errors import PenstockError
from penstock.core.units import duration
from penstock.obs.metric_names import METRICS_FILE
from penstock.obs.sinks.jsonl import read_records


class Steps:
    """The steps of the demo: each has a title, and at its end the time that it took."""

    def __init__(self) -> None:
        self._began: float | None = None

    def begin(self, title: str) -> None:
        """Print the time of the step before, if there is one, and the title of this one."""
        self.end()
        print(f"\n== {title}", flush=True)
        self._began = clock.monotonic()

    def end(self) -> None:
        """Print the time of the step."""
        if self._began is not None:
            print(f"   {duration(clock.monotonic() - self._began)}", flush=True)
        self._began = None


_steps = Steps()
say, say_time = _steps.begin, _steps.end


def command(words: Sequence[object]) -> list[str]:
    """Return the command line of a penstock command."""
    return [sys.executable, "-m", "penstock", *map(str, words)]


def show(words: Sequence[object]) -> None:
    """Print a command as a user types it."""
    print(f"$ penstock {shlex.join(map(str, words))}", flush=True)


def penstock(*words: object) -> None:
    """Print a command and run it.

    Raises:
        PenstockError: it failed.
    """
    show(words)
    code = subprocess.run(command(words), check=False).returncode
    if code:
        raise PenstockError(f"That command exited with {code}", fix="Its message is above.")


def output(*words: object) -> str:
    """Return what a command prints; it is not shown.

    Raises:
        PenstockError: it failed.
    """
    done = subprocess.run(command(words), check=False, stdout=subprocess.PIPE, encoding="utf-8")
    if done.returncode:
        raise PenstockError(f"penstock {shlex.join(map(str, words))} exited with {done.returncode}")
    return done.stdout


def interrupted(*words: object, folder: Path, at_step: int) -> None:
    """Run a training command and send it SIGTERM once it has logged a step."""
    show(words)
    with subprocess.Popen(command(words)) as process:
        while process.poll() is None:
            records = read_records(folder / METRICS_FILE)
            if records and records[-1]["step"] >= at_step:
                print(f"$ kill -TERM {process.pid}", flush=True)
                os.kill(process.pid, signal.SIGTERM)
                break
            clock.sleep(0.2)
    if process.returncode != 75:
        raise PenstockError(f"Training exited with {process.returncode}, not with 75 after saving")
