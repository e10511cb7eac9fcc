"""Damaged files: what their readers raise, and the one error that names the file."""

import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.core.errors import CorpusError


class Malformed(ValueError):
    """A file, or the rest of it, is unreadable: truncated, altered, or of another format.

    The message does not name the file. `reading` names it for token shards. `data prepare` catches it for
    inputs, and rejects the rows that are left.
    """


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn whatever a damaged file leads to into an error that names it.

    Raises:
        CorpusError: the file is damaged.
    """
    try:
        yield
    except struct.error:
        raise _damage(name, "an offset leads outside its message") from None
    except _damages() as error:
        raise _damage(name, (str(error) or "it asks for too much memory").splitlines()[0]) from None


def _damages() -> tuple[type[Exception], ...]:
    """Return what damaged files lead to; pyarrow's own errors only where something imported it."""
    pyarrow = sys.modules.get("pyarrow")
    of_pyarrow = () if pyarrow is None else (pyarrow.ArrowException,)
    return (*of_pyarrow, Malformed, OSError, MemoryError, OverflowError, UnicodeDecodeError)


def _damage(name: str, why: str) -> CorpusError:
    return CorpusError(
        f"{name} cannot be read: {why}", fix="It is truncated or altered: restore it or make it again."
    )
