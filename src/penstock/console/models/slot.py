"""One model in memory at a time: opened on request, lent, closed after a time without use.

    closed -> opening -> open, lent to n users -> idle -> closed after `idle_s`
                              another model is asked for while idle: closed, then that one opens

Who asks for another model while one is in use is refused: two large models would not fit, and a queue of
people who wait for minutes is no answer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, Timer
from typing import Any, Literal, Protocol, TypeVar

from penstock.core.errors import PenstockError

IDLE_S = 300.0


class ModelBusy(PenstockError):
    """Another model is in use, or this one is not to be shared."""


@dataclass(frozen=True, slots=True)
class ModelKey:
    """A checkpoint of a run, opened for a purpose."""

    purpose: Literal["answers", "losses"]
    run_id: str
    step: int
    name: str
    """Name of the run, for people."""

    def __str__(self) -> str:
        """Return what the model does, for people."""
        of = f"the checkpoint of step {self.step:,} of {self.name}"
        return f"answers with {of}" if self.purpose == "answers" else f"scores rows with {of}"


class Closable(Protocol):
    """A model that can be closed."""

    def close(self) -> None:
        """Free it."""
        ...


T = TypeVar("T", bound=Closable)


class ModelSlot:
    """Place of the console's one model. Thread-safe.

    Args:
        idle_s: seconds without use after which a model is closed.
    """

    def __init__(self, *, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._state = Lock()
        self._key: ModelKey | None = None
        self._model: Any = None  # Any: what the opener returned
        self._users = 0
        self._is_opening = False
        self._is_closed = False
        self._timer: Timer | None = None

    @property
    def key(self) -> ModelKey | None:
        """The model that is open or being opened; None: there is none."""
        return self._key

    @contextmanager
    def lent(self, key: ModelKey, open_model: Callable[[], T], *, is_shared: bool) -> Iterator[T]:
        """Context manager: a model, opened if it is not open yet.

        Args:
            open_model: opens it; what it raises is raised here.
            is_shared: several may use it at the same time.

        Raises:
            ModelBusy: another model is in use or being opened, or this one is in use and not shared.
        """
        model: T = self._taken(key, open_model, is_shared=is_shared)
        try:
            yield model
        finally:
            self._given_back()

    def close(self) -> None:
        """Close the model that is open; no other one is opened from now on."""
        with self._state:
            self._is_closed = True
            self._drop()

    def _taken(self, key: ModelKey, open_model: Callable[[], T], *, is_shared: bool) -> T:
        with self._state:
            self._check_open()
            if self._is_opening or (self._users and not (is_shared and key == self._key)):
                doing = "opens a model that" if self._is_opening else "has one model in memory, which"
                raise ModelBusy(f"This console {doing} {self._key}", fix="Try again when that has ended.")
            if key == self._key:
                self._users += 1
                self._stop_clock()
                model: T = self._model
                return model
            self._drop()
            self._key, self._is_opening = key, True
        try:
            opened = open_model()
        except BaseException:
            with self._state:
                self._key, self._is_opening = None, False
            raise
        with self._state:
            self._is_opening = False
            self._model, self._users = opened, 1
            if self._is_closed:
                self._drop()
            self._check_open()
        return opened

    def _check_open(self) -> None:
        if self._is_closed:
            raise ModelBusy("The console is ending")

    def _given_back(self) -> None:
        with self._state:
            self._users -= 1
            if self._users or self._model is None:
                return
            self._timer = Timer(self._idle_s, self._close_idle)
            self._timer.daemon = True
            self._timer.start()

    def _close_idle(self) -> None:
        with self._state:
            if not self._users and not self._is_opening:
                self._drop()

    def _drop(self) -> None:
        self._stop_clock()
        if self._model is not None:
            self._model.close()
        self._model = self._key = None

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
