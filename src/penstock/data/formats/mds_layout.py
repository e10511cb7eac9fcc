"""The layout of an MDS shard: where the values of one column lie in each of its samples.

    uint32 samples; uint32 offsets[samples + 1]; config (JSON); the samples, end to end
    a sample: uint32 size of each column whose size varies, then the columns' bytes

Source: github.com/mosaicml/streaming, base/format/mds/{writer,encodings}.py. An array (`ndarray`,
`ndarray:uint16`, `ndarray:int32:2048`) may carry its type and its shape in front of its values. Nothing
is ever unpickled: a column of kind `pkl` is skipped over, and refused as the column of tokens.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.arrays import Bytes, Int64
from penstock.core.errors import CorpusError
from penstock.data.formats.choice import column_of
from penstock.data.formats.damaged import Malformed
from penstock.data.formats.stored import INTEGERS, dtype_option

CODECS = {"zstd": "zstd", "gz": "gzip", "bz2": "bz2", "br": "brotli"}
"""Last suffix of a compressed shard -> name of the codec in Arrow."""

_TYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    32: "uint32",
    33: "int32",
    64: "uint64",
    65: "int64",
}
"""Type codes in arrays whose column does not say the type."""


@dataclass(frozen=True, slots=True)
class Values:
    """The tokens of each sample; arrays are [samples]."""

    dtype: str
    places: Int64
    """First byte of the values."""
    counts: Int64
    """Number of values."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a shard, from its header, in stored order."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int, ...]
    """Bytes of a value; 0 where they vary."""


def values_of(data: Bytes, options: Mapping[str, str], *, name: str) -> Values:
    """Return where the tokens of each sample lie.

    Args:
        data: the whole shard.
        name: its file, for messages.

    Raises:
        CorpusError: it is damaged, or has no column of tokens.
        UsageError: which column holds the tokens is not clear.
    """
    try:
        columns, bounds = header(data)
        index = _column(columns, options, name)
        places, sizes = extents(data, columns, bounds, index)
        return _array(data, columns.encodings[index], places, sizes, options, name=name)
    except Malformed as error:
        raise CorpusError(
            f"{name} is no sound MDS shard: {error}", fix="It is truncated or altered: restore it."
        ) from None


def header(data: Bytes) -> tuple[Columns, Int64]:
    """Return the columns, and [samples + 1] where samples begin and the last one ends.

    Raises:
        Malformed: it is no shard, or a part of one.
    """
    if len(data) < 8:
        raise Malformed(f"it has {len(data)} bytes")
    count = int(data[:4].view("<u4")[0])
    table = 4 + 4 * (count + 1)
    if table > len(data):
        raise Malformed(f"it is cut off: the table of its {count:,} samples does not fit")
    bounds = data[4:table].view("<u4").astype(np.int64)
    if bounds[0] < table or (np.diff(bounds) < 0).any() or bounds[-1] != len(data):
        raise Malformed("its samples do not lie end to end up to the end of the file")
    return _columns(data[table : bounds[0]].tobytes()), bounds


def _columns(text: bytes) -> Columns:
    try:
        config: Any = json.loads(text)  # what it holds is checked here
        names, encodings = tuple(config["column_names"]), tuple(config["column_encodings"])
        sizes = tuple(size or 0 for size in config["column_sizes"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Malformed("its header is no description of columns") from None
    texts = all(isinstance(text, str) for text in (*names, *encodings))
    if not texts or not all(type(size) is int and 0 <= size < 2**32 for size in sizes):
        raise Malformed("its header is no description of columns")
    if not len(names) == len(encodings) == len(sizes) or len(set(names)) < len(names):
        raise Malformed("its header is no description of columns")
    return Columns(names, encodings, sizes)


def text_columns_of(columns: Columns) -> list[str]:
    """Return the columns that hold texts."""
    return [name for name, kind in zip(columns.names, columns.encodings, strict=True) if kind == "str"]


def _column(columns: Columns, options: Mapping[str, str], name: str) -> int:
    kinds = dict(zip(columns.names, columns.encodings, strict=True))
    if kinds.get(options.get("column", "")) == "pkl":
        raise CorpusError(
            f"{name} stores column {options['column']!r} as pickles, which may run code when they are read",
            fix="Write it again with the encoding 'ndarray:uint32'.",
        )
    tokens = [column for column, kind in kinds.items() if _may_be_tokens(kind)]
    arrays = [column for column in tokens if kinds[column] != "bytes"]
    candidates = tokens if options.get("column") in tokens or not arrays else arrays
    what = "integer arrays or bytes"
    if not candidates and (texts := text_columns_of(columns)):
        words = ["penstock", "data", "prepare", "FOLDER", "--text-column", texts[0], "--out", "corpus"]
        raise CorpusError(
            f"{name} holds text ({', '.join(texts[:8])}), not token ids",
            fix=f"Make a corpus of it: `{shlex.join(words)}` with a --tokenizer.",
        )
    if not candidates:
        held = ", ".join(f"{column} ({kind})" for column, kind in kinds.items())
        what = f"{what} among {held}"
    return columns.names.index(column_of(candidates, options, name=name, what=what))


def _may_be_tokens(kind: str) -> bool:
    family, _, rest = kind.partition(":")
    dtype = rest.partition(":")[0]
    return kind == "bytes" or (family == "ndarray" and (not dtype or dtype in INTEGERS))


def extents(data: Bytes, columns: Columns, bounds: Int64, index: int) -> tuple[Int64, Int64]:
    """Return where a column's value lies in each sample, and its bytes.

    Raises:
        Malformed: the columns do not fill a sample.
    """
    heads = 4 * columns.sizes.count(0)
    begins = bounds[:-1]
    if (np.diff(bounds) < heads).any():
        raise Malformed("a sample is too short for its columns")
    at, head = begins + heads, begins.copy()
    place, size = at, at
    for number, fixed in enumerate(columns.sizes):
        bytes_here = np.full_like(at, fixed) if fixed else _numbers(data, head, "<u4")
        head = head if fixed else head + 4
        if number == index:
            place, size = at, bytes_here
        at = at + bytes_here
    if (at != bounds[1:]).any():
        raise Malformed(f"the columns of sample {int((at != bounds[1:]).argmax()):,} do not fill it")
    return place, size


def _array(
    data: Bytes, encoding: str, places: Int64, sizes: Int64, options: Mapping[str, str], *, name: str
) -> Values:
    """Return where the values are within the bytes of a column, and their type."""
    family, *given = encoding.split(":")
    if family == "bytes":
        return _whole(dtype_option(options, default="int64", name=name), places, sizes)
    dtype = given[0] if given and given[0] else None
    if dtype is None:
        dtype, places, sizes = _named_type(data, places, sizes)
    if len(given) < 2:
        _check_room(sizes, 1)
        shape = _numbers(data, places, "<u1")
        skipped = 1 + (shape >> 2 << (shape & 3))
        _check_room(sizes, skipped)
        places, sizes = places + skipped, sizes - skipped
    return _whole(dtype, places, sizes)


def _named_type(data: Bytes, places: Int64, sizes: Int64) -> tuple[str, Int64, Int64]:
    _check_room(sizes, 1)
    codes = np.unique(_numbers(data, places, "<u1")).tolist()
    if len(codes) > 1 or (codes and codes[0] not in _TYPES):
        raise Malformed(f"its arrays are not all of one integer type (types {codes[:8]})")
    return _TYPES[codes[0]] if codes else "uint32", places + 1, sizes - 1


def _whole(dtype: str, places: Int64, sizes: Int64) -> Values:
    counts, rest = np.divmod(sizes, np.dtype(dtype).itemsize)
    if rest.any():
        raise Malformed(f"sample {int((rest > 0).argmax()):,} has no whole number of {dtype} tokens")
    return Values(dtype, places, counts)


def _check_room(sizes: Int64, needed: Int64 | int) -> None:
    if (sizes < needed).any():
        raise Malformed(f"the array of sample {int((sizes < needed).argmax()):,} is cut off")


def _numbers(data: Bytes, at: Int64, dtype: str) -> Int64:
    """Return the numbers at these places; all lie in the file, which the callers made sure of."""
    places = at[:, None] + np.arange(np.dtype(dtype).itemsize)
    found: Int64 = data[places].view(dtype).ravel().astype(np.int64)
    return found
