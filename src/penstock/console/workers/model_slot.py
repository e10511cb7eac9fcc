"""One model at a time: a process, started on request, lent, ended after a time without use.

    none -> opening -> open, lent to n users -> idle -> ended by itself
                             another model is asked for while idle: ended, then that one opens

Who asks for another model while one is in use is refused: two large models would not fit, and a queue of
people who wait for minutes is no answer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol

from penstock.console.workers.data_process import DataProcess
from penstock.console.workers.model_process import ModelProcess
from penstock.core import env
from penstock.core.errors import PenstockError
from penstock.core.units import mib

MAX_CONTEXT = 4096
"""Tokens of a prompt and its answer together."""
_CACHED_CONTEXTS = 4
_BLOCK = 16
_RESERVE = 1.25
"""Memory asked for over that of the weights: layers are packed one by one."""


class ModelBusy(PenstockError):
    """Another model is in use or being opened."""


@dataclass(frozen=True, slots=True)
class ModelKey:
    """A checkpoint of a run."""

    run: Path
    step: int
    name: str
    """Name of the run, for people."""

    def __str__(self) -> str:
        """Return it for people."""
        return f"the checkpoint of step {self.step:,} of {self.name}"


class Opener(Protocol):
    """Opens a checkpoint."""

    def __call__(self, key: ModelKey, *, context: int) -> ModelProcess:
        """Return the process of a checkpoint that takes prompts of so many tokens."""
        ...


def opener(data: DataProcess) -> Opener:
    """Return what opens checkpoints, if the memory has room for them."""

    def open_model(key: ModelKey, *, context: int) -> ModelProcess:
        size = data.ask("model", key.run, step=key.step)
        context = min(size["context"], context)
        cached = max(context, _CACHED_CONTEXTS * min(context, MAX_CONTEXT)) + _BLOCK
        cache_bytes = size["token_bytes"] * cached
        needed, free = int(_RESERVE * size["weight_bytes"]) + cache_bytes, env.available_bytes()
        if needed > free:
            raise PenstockError(
                f"The model of step {key.step:,} would take {mib(needed)} of memory, and {mib(free)} are "
                "free",
                fix="Open it on another machine with `penstock chat`.",
            )
        return ModelProcess(key.run, key.step, context=context, cache_bytes=cache_bytes)

    return open_model


@dataclass(slots=True)
class _Open:
    key: ModelKey
    model: ModelProcess
    context: int
    users: int = 0


class ModelSlot:
    """Place of the console's one model. Thread-safe.

    Args:
        open_model: opens a checkpoint.
    """

    def __init__(self, open_model: Opener) -> None:
        self._open_model: Callable[..., ModelProcess] = open_model
        self._state = Lock()
        self._open: _Open | None = None
        self._opening: ModelKey | None = None
        self._is_closed = False

    @property
    def key(self) -> ModelKey | None:
        """The model that is open or being opened; None: there is none."""
        known = self._open
        return self._opening or (known.key if known is not None and known.model.is_alive else None)

    @contextmanager
    def lent(self, key: ModelKey, *, context: int = MAX_CONTEXT) -> Iterator[ModelProcess]:
        """Context manager: a model, opened if it is not open yet; several may use it at the same time.

        Args:
            context: tokens of a prompt and its answer; a model that is open with fewer is opened again.

        Raises:
            ModelBusy: another model is in use or being opened.
            PenstockError: it cannot be opened.
        """
        taken = self._taken(key, context)
        try:
            yield taken.model
        finally:
            with self._state:
                taken.users -= 1

    def close(self) -> None:
        """Close the model that is open; no other one is opened from now on."""
        with self._state:
            self._is_closed = True
            self._drop()

    def _taken(self, key: ModelKey, context: int) -> _Open:
        with self._state:
            self._check_open()
            if self._opening is not None:
                raise ModelBusy(f"This console opens {self._opening}", fix="Try again when that has ended.")
            known = self._open
            if known is not None and known.model.is_alive:
                if key == known.key and context <= known.context:
                    known.users += 1
                    return known
                if known.users:
                    said = f"This console has one model in memory, which is in use: {known.key}"
                    raise ModelBusy(said, fix="Try again when that has ended.")
            self._drop()
            self._opening = key
        try:
            opened = _Open(key, self._open_model(key, context=context), context, users=1)
        except BaseException:
            with self._state:
                self._opening = None
            raise
        with self._state:
            self._opening, self._open = None, opened
            if self._is_closed:
                self._drop()
            self._check_open()
        return opened

    def _check_open(self) -> None:
        if self._is_closed:
            raise ModelBusy("The console is ending")

    def _drop(self) -> None:
        if self._open is not None:
            self._open.model.close()
        self._open = None
