"""Progress display: a bar on a terminal, an event of the log now and then elsewhere; on standard error."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from penstock.core.clock import monotonic
from penstock.core.log import Event, print_event
from penstock.core.units import duration, si

_SECONDS_BETWEEN_LINES = 4.0  # no command is silent for five seconds


class Display(AbstractContextManager["Display"]):
    """Shows the progress of a job; use it in a `with` statement."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(None),
            TextColumn("{task.fields[note]}"),
        )
        self._bar = (
            Bar(*columns, console=console, transient=True, expand=True) if console.is_terminal else None
        )
        self._task = self._bar.add_task("", total=None, note="") if self._bar else None
        self._stage = ""
        self._began = self._shown = (0.0, 0, 0)

    def show(self, stage: str, done: int, total: int | None, *, tokens: int | None = None) -> None:
        """Show the progress of a stage.

        Args:
            done: bytes done, of `total`; total None: unknown.
            tokens: tokens made so far, to show a rate.
        """
        now = monotonic()
        if stage != self._stage:
            self._stage, self._began = stage, (now, done, tokens or 0)
            self._shown = (now, done, tokens or 0)
            if self._bar is None:
                print_event(Event("stage", "{stage:sentence}", stage=stage))
        elapsed_s = now - self._began[0]
        rate = None if tokens is None else (tokens - self._began[2]) / max(elapsed_s, 1e-3)
        left_s = left_after(elapsed_s, done - self._began[1], left=(total or 0) - done)
        if self._bar is not None and self._task is not None:
            left = "" if left_s is None else f"{duration(left_s)} left"
            if not total:
                left = f"{duration(elapsed_s)} so far"
            note = left if rate is None else f"{si(tokens or 0)} tokens  {si(rate)} tokens/s  {left}"
            percent = f"{done / total:.0%}" if total else ""
            self._bar.update(
                self._task, description=escape(stage), total=total, completed=done, note=f"{percent} {note}"
            )
        elif total and now - self._shown[0] >= _SECONDS_BETWEEN_LINES:
            self._shown = (now, done, tokens or 0)
            print_event(_event(stage, done / total, tokens, rate, left_s))
        elif not total and now - self._shown[0] >= _SECONDS_BETWEEN_LINES:
            self._shown = (now, done, tokens or 0)
            print_event(
                Event(
                    "progress",
                    "{stage:sentence}: {elapsed_s:duration} so far",
                    stage=stage,
                    elapsed_s=elapsed_s,
                )
            )

    def __enter__(self) -> "Display":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def step_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show steps on a terminal, and nothing elsewhere; yields `show(done, total)`."""
    columns = (TextColumn(name), BarColumn(), TextColumn("{task.completed}/{task.total} steps"))
    console = Console(stderr=True)
    is_seen = console.is_terminal  # elsewhere all that would be left of it is an empty line
    with Bar(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not is_seen) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _event(stage: str, share: float, tokens: int | None, rate: float | None, left_s: float | None) -> Event:
    if left_s is None:
        return Event("progress", "{stage:sentence}: {share:.0%}", stage=stage, share=share)
    if tokens is None or rate is None:
        return Event(
            "progress",
            "{stage:sentence}: {share:.0%}, {left_s:duration} left",
            stage=stage,
            share=share,
            left_s=left_s,
        )
    return Event(
        "progress",
        "{stage:sentence}: {share:.0%}, {tokens:si} tokens, {tokens_per_s:si} tokens/s, "
        "{left_s:duration} left",
        stage=stage,
        share=share,
        tokens=tokens,
        tokens_per_s=rate,
        left_s=left_s,
    )


def left_after(elapsed_s: float, done: int, *, left: int) -> float | None:
    """Return the remaining seconds at the rate so far; None before there is a rate.

    >>> left_after(10.0, 100, left=50), left_after(0.0, 0, left=50)
    (5.0, None)
    """
    return elapsed_s * left / done if done > 0 and elapsed_s > 0 and left >= 0 else None
