"""A progress bar on a terminal, a line now and then elsewhere; always on standard error."""

import sys
from contextlib import AbstractContextManager
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bar

from penstock.core.clock import monotonic
from penstock.core.units import duration, si

_SECONDS_BETWEEN_LINES = 10.0


class Display(AbstractContextManager["Display"]):
    """Shows how far a job is; use it in a `with` statement."""

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
        """Show a stage.

        Args:
            done: bytes done, of `total`; None for a stage of unknown length.
            tokens: tokens made so far, for a rate.
        """
        now = monotonic()
        if stage != self._stage:
            self._stage, self._began = stage, (now, done, tokens or 0)
            self._shown = (now, done, tokens or 0)
            if self._bar is None:
                print(f"penstock: {stage}", file=sys.stderr)
        note = note_of(now - self._began[0], done - self._began[1], left=(total or 0) - done)
        if tokens is not None:
            rate = (tokens - self._began[2]) / max(now - self._began[0], 1e-3)
            note = f"{si(tokens)} tokens  {si(rate)} tokens/s  {note}"
        percent = f"{100 * done / total:.0f}%" if total else ""
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task, description=escape(stage), total=total, completed=done, note=f"{percent} {note}"
            )
        elif total and now - self._shown[0] >= _SECONDS_BETWEEN_LINES:
            self._shown = (now, done, tokens or 0)
            print(f"penstock: {stage} {percent} {note}", file=sys.stderr)

    def __enter__(self) -> "Display":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def note_of(elapsed_s: float, done: int, *, left: int) -> str:
    """Say how long the rest takes at the rate so far; nothing before there is a rate.

    >>> note_of(10.0, 100, left=50), note_of(0.0, 0, left=50)
    ('5.0 s left', '')
    """
    return f"{duration(elapsed_s * left / done)} left" if done and elapsed_s > 0 and left >= 0 else ""
