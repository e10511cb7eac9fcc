"""Console sink: a live progress line with rich on a terminal, else events of the log for some steps."""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock.core import clock
from penstock.core.log import Event, print_event
from penstock.core.units import si
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
        if "loss" in record:
            self._stepped(record)

    def _validated(self, record: Record) -> None:
        step, loss, bits = record["step"], record["validation_loss"], record.get("validation_bits_per_byte")
        in_bits = "" if bits is None else f" ({bits:.3f} bits/byte)"
        if self._bar is not None:
            self._validation = f"  validation {loss:.4f}{in_bits}"
            self._bar.update(self._task, description=f"{self._loss}{self._validation}  {self._rate}")
        elif bits is None:
            event = Event(
                "validated",
                "Step {step:,} of {steps:,}: validation loss {validation_loss:.4f}",
                step=step,
                steps=self._steps,
                validation_loss=loss,
            )
            print_event(event, source=__name__)
        else:
            event = Event(
                "validated",
                "Step {step:,} of {steps:,}: validation loss {validation_loss:.4f} ({bits_per_byte:.3f} "
                "bits/byte)",
                step=step,
                steps=self._steps,
                validation_loss=loss,
                bits_per_byte=bits,
            )
            print_event(event, source=__name__)

    def _stepped(self, record: Record) -> None:
        self._loss, self._rate = f"loss {record['loss']:.4f}", f"{si(record['tokens_per_s'])} tokens/s"
        if self._bar is not None:
            text = f"{self._loss}{self._validation}  {self._rate}"
            self._bar.update(self._task, completed=record["step"], description=text)
            return
        now = clock.monotonic()
        left_s = self._time_left.after(record["step"], now=now)
        if now - self._said >= _PLAIN_EVERY_S or record["step"] in (self._done + 1, self._steps):
            self._said = now
            print_event(_step_event(record, steps=self._steps, left_s=left_s), source=__name__)


def _step_event(record: Record, *, steps: int, left_s: float | None) -> Event:
    step, loss, speed = record["step"], record["loss"], record["tokens_per_s"]
    if not left_s:
        return Event(
            "step",
            "Step {step:,} of {steps:,}: loss {loss:.4f}, {tokens_per_s:si} tokens/s",
            step=step,
            steps=steps,
            loss=loss,
            tokens_per_s=speed,
        )
    return Event(
        "step",
        "Step {step:,} of {steps:,}: loss {loss:.4f}, {tokens_per_s:si} tokens/s, {left_s:duration} left",
        step=step,
        steps=steps,
        loss=loss,
        tokens_per_s=speed,
        left_s=left_s,
    )
