"""Console sink: a live progress line with rich on a terminal, else plain lines for some steps."""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock.core import clock
from penstock.core.units import duration, si
from penstock.obs.sinks import Record
from penstock.obs.time_left import TimeLeft

if TYPE_CHECKING:
    from rich.progress import Progress

_PLAIN_EVERY_S = 10.0


class ProgressLine:
    """Progress line with steps, loss, rate and time left; use as a context manager.

    Args:
        steps: steps of the whole run.
        done: steps before this process started.
    """

    def __init__(self, *, steps: int, done: int) -> None:
        self._steps, self._done = steps, done
        self._loss = self._validation = self._rate = ""
        self._said = clock.monotonic()
        self._time_left = TimeLeft(steps=steps)
        self._bar: Progress | None = None
        self._task: Any = 0  # rich's TaskID

    def __enter__(self) -> "ProgressLine":
        if sys.stderr.isatty() and find_spec("rich") is not None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

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
        if record.get("event") == "evaluation" and self._bar is None:
            said = "  ".join(f"{name} {value:.4f}" for name, value in record["task_scores"].items())
            print(f"step {record['step']}/{self._steps}  {said}", file=sys.stderr, flush=True)  # noqa: T201
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
        seconds = self._time_left.after(record["step"], now=now)
        if now - self._said >= _PLAIN_EVERY_S or record["step"] in (self._done + 1, self._steps):
            self._said = now
            left = f"  {duration(seconds)} left" if seconds else ""
            print(f"step {record['step']}/{self._steps}  {text}{left}", file=sys.stderr, flush=True)  # noqa: T201
