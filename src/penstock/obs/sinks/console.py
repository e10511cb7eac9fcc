"""A live progress line on a terminal; elsewhere plain lines, of some steps and of each validation."""

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from penstock.core import clock
from penstock.core.units import duration, si
from penstock.obs.sinks import Record

_PLAIN_EVERY_S = 10.0


class ProgressLine:
    """Shows steps, loss, rate and time left; use as a context manager.

    Args:
        steps: of the whole run.
        done: taken before this process started.
    """

    def __init__(self, *, steps: int, done: int) -> None:
        self._steps, self._done = steps, done
        self._loss = self._validation = self._rate = ""
        self._start = self._said = clock.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> "ProgressLine":
        if sys.stderr.isatty():
            columns = (
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task("", total=self._steps, completed=self._done)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, record: Record) -> None:
        """Show one record."""
        if "validation_loss" in record:
            self._validated(record)
        if "loss" in record:
            self._stepped(record)

    def _validated(self, record: Record) -> None:
        bits = record.get("validation_bits_per_byte")
        said = f"validation {record['validation_loss']:.4f}" + (
            "" if bits is None else f" ({bits:.3f} bits/byte)"
        )
        if self._bar is None:
            print(f"step {record['step']}/{self._steps}  {said}", file=sys.stderr, flush=True)  # noqa: T201
            return
        self._validation = f"  {said}"
        self._bar.update(self._task, description=f"{self._loss}{self._validation}  {self._rate}")

    def _stepped(self, record: Record) -> None:
        self._loss, self._rate = f"loss {record['loss']:.4f}", f"{si(record['tokens_per_s'])} tokens/s"
        text = f"{self._loss}{self._validation}  {self._rate}"
        if self._bar is not None:
            self._bar.update(self._task, completed=record["step"], description=text)
            return
        now = clock.monotonic()
        if now - self._said >= _PLAIN_EVERY_S or record["step"] in (self._done + 1, self._steps):
            self._said = now
            rate = (record["step"] - self._done) / max(now - self._start, 1e-9)
            left = duration((self._steps - record["step"]) / rate)
            print(f"step {record['step']}/{self._steps}  {text}  {left} left", file=sys.stderr, flush=True)  # noqa: T201
