"""A run that is asked about again and again: opened once, kept for some seconds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, Timer

from penstock.core.errors import PenstockError
from penstock.obs.metric_names import RECIPE_FILE
from penstock.train.control.requests import answered
from penstock.train.inspect.open_run import OpenRun, open_run

_KEPT_S = 5.0


def opened_run(folder: Path, *, fields: Sequence[str] = ()) -> OpenRun:
    """Open a run.

    Args:
        fields: columns beside the tokens that its rows are to have.

    Raises:
        PenstockError: its recipe is invalid, or its files or corpora cannot be read.
    """
    try:
        return open_run(folder, fields=fields)
    except OSError as error:
        raise PenstockError(
            f"The data of this run cannot be read: {error}", fix="Have its corpora moved, or been deleted?"
        ) from None


class RecentRun:
    """Run that was opened last, kept for some seconds: a page asks for it at each pause of a slider.

    Thread-safe; one caller at a time: who asks for another run waits, too.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._opened: OpenRun | None = None
        self._of: tuple[object, ...] = ()
        self._timer: Timer | None = None

    @contextmanager
    def lent(self, folder: Path) -> Iterator[OpenRun]:
        """Open a run, unless it is open and has the same recipe and replies. Changes are undone afterwards.

        Raises:
            PenstockError: as `opened_run`.
        """
        with self._lock:
            found = folder, _version(folder)
            if self._opened is None or found != self._of:
                self._forget()
                self._opened, self._of = opened_run(folder), found
                self._timer = Timer(_KEPT_S, self.close)
                self._timer.daemon = True
                self._timer.start()
            loader = self._opened.loader
            before = loader.snapshot()
            try:
                yield self._opened
            finally:
                loader.restore(before)

    def close(self) -> None:
        """Forget the run; it is opened again when somebody asks."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._opened = None
        if self._timer is not None:
            self._timer.cancel()


def _version(folder: Path) -> tuple[object, ...]:
    """Return what changes when a run has another recipe or a new reply."""
    try:
        status = (folder / RECIPE_FILE).stat()
        return status.st_mtime_ns, status.st_size, answered(folder)
    except OSError:  # whoever opens it is told
        return ()
