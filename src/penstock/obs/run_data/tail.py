"""New lines of a growing file that may be cut, rewritten or replaced while it is read.

A reader keeps how many bytes it has consumed, and a digest of the last of them. A file that is shorter, or
has other bytes there, was rewritten (a resumed run drops records, a user edits) and is read from its start. A
file that was replaced by one with the same history is read on, as it may be.

A line is consumed once its end is there. Memory is bounded: a block is read at a time, and a line longer than
a block, which no run writes, is dropped and counted.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import TIMEOUT_MAX, Lock
from typing import BinaryIO

from penstock.core import clock
from penstock.obs.run_data.run_files import FileStamp, RunFiles

BLOCK_BYTES = 8 << 20
_CHECKED_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Whole lines that were read together."""

    content: bytes
    """The lines, each with its end."""
    offset: int
    """Bytes of the file before the first."""
    is_restart: bool = False
    """True: the file was rewritten, and what was read before is void."""
    num_dropped: int = 0
    """Lines that were too long."""


class Tail:
    """Reads on in a file where the last call ended. `hand_over` may be called from several threads.

    Args:
        files: files of the run.
        name: of the file.
        block_bytes: read at once, and the longest line that is kept.
    """

    def __init__(self, files: RunFiles, name: str, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._files, self._name, self._block_bytes = files, name, block_bytes
        self._offset, self._digest = 0, _digest_of(b"")
        self._is_inside = False  # a line that is dropped, because it is too long
        self._stamp: FileStamp | None = None  # of an object that was read to its end
        self._reading = Lock()

    def hand_over(self, take: Callable[[LineBlock], None], *, most_s: float = math.inf) -> bool:
        """Hand the new lines over; return whether that was all.

        Args:
            take: called with each block, by one thread at a time.
            most_s: seconds after which the rest is left to a later call.
        """
        until = clock.monotonic() + most_s
        if not self._reading.acquire(timeout=min(most_s, TIMEOUT_MAX)):
            return False
        try:
            for block in self.blocks():
                take(block)
                if clock.monotonic() > until:
                    return False
        except OSError:  # not written yet, deleted, or an object replaced while it was read: next time
            return True
        finally:
            self._reading.release()
        return True

    def blocks(self) -> Iterator[LineBlock]:
        """Yield the complete lines that are new; one caller at a time.

        Raises:
            OSError: the file is not there, or an object was replaced while it was read: ask again later.
        """
        stamp = self._files.stamp(self._name)  # an object is opened at the version last seen
        if self._files.is_stored and stamp == self._stamp:
            return
        with self._files.open(self._name) as file:
            if not self._is_continued(file):
                self._offset, self._digest, self._is_inside = 0, _digest_of(b""), False
                yield LineBlock(b"", 0, is_restart=True)
            while block := self._next(file):
                yield block
        self._stamp = stamp

    def _is_continued(self, file: BinaryIO) -> bool:
        """Return whether a file still begins with what was consumed, as far as the digest tells."""
        file.seek(0, 2)
        return file.tell() >= self._offset and _digest(file, self._offset) == self._digest

    def _next(self, file: BinaryIO) -> LineBlock | None:
        file.seek(self._offset)
        content, first = file.read(self._block_bytes), self._offset
        end = content.rfind(b"\n") + 1
        if not end and len(content) < self._block_bytes:
            return None
        begin, num_dropped = 0, 0
        if not end:
            num_dropped, end, begin = int(not self._is_inside), len(content), len(content)
        elif self._is_inside:
            begin = content.find(b"\n") + 1
        self._is_inside = content[end - 1 : end] != b"\n"
        self._offset += end
        tail = content[max(0, end - _CHECKED_BYTES) : end]
        is_whole = len(tail) == _CHECKED_BYTES or not first
        self._digest = _digest_of(tail) if is_whole else _digest(file, self._offset)
        return LineBlock(content[begin:end], first + begin, num_dropped=num_dropped)


def _digest(file: BinaryIO, offset: int) -> bytes:
    first = max(0, offset - _CHECKED_BYTES)
    file.seek(first)
    return _digest_of(file.read(offset - first))


def _digest_of(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
