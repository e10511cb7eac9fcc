"""Tokens stored in any integer type, served as uint16 or uint32; what is no token id is refused."""

from collections.abc import Callable, Mapping

import numpy as np

from penstock.core.arrays import Array, Tokens
from penstock.core.dtypes import choice_of
from penstock.core.errors import CorpusError, UsageError, nearest
from penstock.storage.base import Slices

INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


Where = Callable[[int], str]
"""Says where a token is, for messages."""


def served(stored: Slices, dtype: str, *, name: str, where: Where = "at position {:,}".format) -> Slices:
    """Return tokens of a stored type as uint16 where that type fits, else as uint32.

    uint16 and uint32 are served in place. The others are copied slice by slice, and checked.

    Args:
        stored: tokens as one of INTEGERS.
        name: the file they come from, for messages.
        where: says where the token at an index is.
    """
    return stored if dtype in ("uint16", "uint32") else _Converted(stored, np.dtype(dtype), name, where)


class _Converted:
    def __init__(self, stored: Slices, dtype: np.dtype[np.integer], name: str, where: Where) -> None:
        self._stored, self._dtype, self._name, self._where = stored, dtype, name, where
        # A slice costs microseconds: what does not change is looked up once.
        self._unsigned = np.dtype(f"u{dtype.itemsize}")  # as which a negative id is a huge one
        self._limit = min(np.iinfo(dtype).max, 2**32 - 1)
        self._served = np.dtype(np.uint16 if dtype.itemsize <= 2 else np.uint32)

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, part: slice, /) -> Tokens:
        values: Array = self._stored[part].view(self._unsigned)
        if values.size and np.maximum.reduce(values) > self._limit:
            self._refuse(values, part)
        tokens: Tokens = values.astype(self._served, copy=False)
        return tokens

    def _refuse(self, values: Array, part: slice) -> None:
        place = int((values > self._limit).argmax())
        start, found = part.indices(len(self))[0], int(values[place : place + 1].view(self._dtype)[0])
        raise CorpusError(
            f"{self._name} has token {found} {self._where(start + place)}, which is no token id",
            fix=f"Ids are from 0 to {self._limit:,}: make the file again.",
        )


def dtype_option(options: Mapping[str, str], *, default: str | None, name: str) -> str:
    """Return the `dtype` that a user gives for files that do not say theirs.

    Raises:
        UsageError: it is no integer type, or there is none and no default.
    """
    dtype = options.get("dtype", default)
    if dtype is None:
        raise UsageError(
            f"{name} does not say the type of its tokens", fix="Add it: ',dtype=uint16' or ',dtype=uint32'."
        )
    dtype = choice_of(dtype, INTEGERS)
    if dtype not in INTEGERS:
        raise UsageError("dtype must be an integer type", got=dtype, fix=nearest(dtype, list(INTEGERS)))
    return dtype


def whole_items(size: int, dtype: str, *, name: str) -> int:
    """Return how many items of a type so many bytes hold.

    Raises:
        CorpusError: the last one is cut off.
    """
    count, rest = divmod(size, np.dtype(dtype).itemsize)
    if rest:
        raise CorpusError(
            f"{name} has {size:,} bytes of tokens, which is no whole number of {dtype}",
            fix="It is truncated, or its tokens are of another type: give the right dtype.",
        )
    return count


def little(dtype: str) -> str:
    """Return a type as it lies in a file, whatever the machine.

    >>> little("int32")
    '<i4'
    """
    return np.dtype(dtype).newbyteorder("<").str
