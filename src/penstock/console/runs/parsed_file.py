"""A run's file that grows, and what was parsed of it: in a cache folder, extended by what is new.

The file is read in pieces, each in a turn of its own, so that whoever asks for what is parsed already waits
for a piece, not for the file. The cache may be deleted at any time; one that is damaged, or of another
version, is parsed again.
"""

import json
import math
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

from penstock.console.runs.cache_folder import CacheFolder, unwritable
from penstock.console.runs.run_files import FileStamp, RunFiles
from penstock.console.runs.tail import PIECE_BYTES, FilePosition, Piece, is_continued, pieces
from penstock.console.runs.turns import RunBusy, Turns
from penstock.core import clock

_SAVE_AFTER_S = 5.0
_STATE_FILE = "state.json"


class ParsedState(Protocol):
    """State of a parsed file, besides its values; a dataclass that is stored as JSON."""

    mark: FilePosition
    """Position in the file after what was parsed."""


State = TypeVar("State", bound=ParsedState)


class ParsedFile(ABC, Generic[State]):
    """Parsed content of a file that grows, kept up with it. Methods may be called from several threads.

    Args:
        files: files of the run.
        name: of the file.
        cache: folder of the parsed content.
    """

    _piece_bytes = PIECE_BYTES

    def __init__(self, files: RunFiles, name: str, cache: Path) -> None:
        self._files, self._name = files, name
        self._turns = Turns()
        self._cache = CacheFolder(cache)
        self._is_closed = False
        self._stamp: FileStamp | None = None  # of an object that was read to its end
        self._saved_at = -math.inf
        self._state = self._load()

    @abstractmethod
    def _first_state(self) -> State:
        """Return the state of a file of which nothing was parsed."""

    @abstractmethod
    def _stored_state(self, raw: dict[str, Any]) -> State:  # Any: JSON
        """Return the state of the cache.

        Raises:
            OSError, ValueError, TypeError, KeyError, AttributeError: the cache is not one of this version.
        """

    @abstractmethod
    def _parse(self, piece: Piece) -> None:
        """Add the lines of a piece to the cache and the state, and move its mark.

        Raises:
            OSError: the cache cannot be written; then the state must be what it was, or earlier.
        """

    @property
    def position(self) -> FilePosition:
        """Position in the file after what was parsed."""
        return self._state.mark

    def close(self) -> None:
        """Save, and let another process use the cache."""
        with self._turns.turn(is_patient=True):
            if self._is_closed:
                return
            self._is_closed = True
            self._save()
            self._cache.close()

    def update(self, *, most_s: float = math.inf) -> bool:
        """Add what is new in the file; return whether that was all.

        Args:
            most_s: seconds after which the rest is left to a later call.

        Raises:
            PenstockError: the cache folder cannot be written.
            RunBusy: other requests read the run for too long.
        """
        until = clock.monotonic() + most_s
        try:
            stamp = self._files.stamp(self._name)  # an object is opened at the version last seen
            if self._files.is_stored and stamp == self._stamp:
                return True
            with self._files.open(self._name) as file:
                is_all = self._read_on(file, until=until)
        except OSError:  # deleted, not written yet, or an object replaced while it was read: next time
            return True
        if is_all:
            self._stamp = stamp
        if clock.monotonic() - self._saved_at > _SAVE_AFTER_S:
            with self._turns.turn():
                if not self._is_closed:
                    self._save()
        return is_all

    def _read_on(self, file: BinaryIO, *, until: float) -> bool:
        """Add what is new. Several threads may: a piece that another has added is not added again."""
        while True:
            position = self.position
            goes_on = is_continued(file, position)
            with self._turns.turn():
                self._check_open()
                if self.position != position:  # another thread was faster
                    continue
                if not goes_on:  # the file was rewritten
                    self._restart()
                    position = self.position
            for piece in pieces(file, position, piece_bytes=self._piece_bytes):
                with self._turns.turn():
                    self._check_open()
                    if self.position != position:
                        break
                    self._add(piece)
                    position = piece.mark
                if clock.monotonic() > until:
                    return False
            else:
                return True

    def _add(self, piece: Piece) -> None:
        try:
            self._parse(piece)
        except OSError as error:
            raise unwritable(error) from None

    def _restart(self) -> None:
        """Forget everything."""
        self._cache.empty()
        self._state = self._first_state()
        self._stamp = None

    def _check_open(self) -> None:
        """Raise RunBusy once it is closed; call inside a turn."""
        if self._is_closed:
            raise RunBusy("So many runs are open that this one was closed", fix="Ask for it again.")

    def _load(self) -> State:
        """Return the state of the cache; the first one if it is damaged or of another version."""
        try:
            return self._stored_state(json.loads((self._cache.path / _STATE_FILE).read_bytes()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self._cache.empty()
            return self._first_state()

    def _save(self) -> None:
        draft = self._cache.path / f".{_STATE_FILE}.tmp"
        with suppress(OSError):
            draft.write_text(json.dumps(self._state, default=_fields), encoding="utf-8")
            draft.replace(self._cache.path / _STATE_FILE)
        self._saved_at = clock.monotonic()


def _fields(found: Any) -> dict[str, Any]:  # Any: a dataclass, JSON
    """Return the fields of a dataclass; `asdict` would copy the values, some of which are long."""
    return {field.name: getattr(found, field.name) for field in fields(found)}
