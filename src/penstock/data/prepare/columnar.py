"""Columns of tabular inputs: CSV, Parquet, Arrow (Hugging Face datasets) and MDS (MosaicML Streaming).

The files may be of anyone. Nothing is unpickled, offsets are checked before they are followed, and a value
above the limit is not copied. Arrow and MDS files are memory-mapped; a compressed MDS shard is unpacked into
a temporary file, of at most 4 GiB, which its 32-bit offsets cannot exceed.
"""

import mmap
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from penstock.core.arrays import Bytes
from penstock.core.packages import Package
from penstock.data.formats.choice import text_columns
from penstock.data.formats.damaged import Malformed
from penstock.data.formats.mds_layout import CODECS, extents, header, text_columns_of
from penstock.data.prepare.byte_streams import BROKEN_STREAM, MAX_ZSTD_LONG, as_utf8, chunks, open_stream
from penstock.data.prepare.csv_rows import BrokenCsv, csv_rows
from penstock.data.prepare.plan import Kind

pa = Package("pyarrow", "Arrow and Parquet files")
pq = Package("pyarrow.parquet", "Parquet files")

TABULAR: dict[Kind, str] = {"csv": "CSV", "parquet": "Parquet", "arrow": "Arrow", "mds": "MDS"}
"""Kinds of inputs with columns, and their names in messages."""

_LARGEST_SHARD = 2**32
_PIECE = 2**20
_ARROW_FILE = b"ARROW1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumns:
    """Columns of a file."""

    kinds: dict[str, str]
    """Name -> type, in stored order."""
    texts: list[str]
    """Those that hold texts."""

    def __str__(self) -> str:
        """Return the names and types of the first columns."""
        return ", ".join(f"{name} ({kind})" for name, kind in list(self.kinds.items())[:8])


def columns_of(path: str, kind: Kind) -> TableColumns:
    """Return the columns of a file from its header.

    Raises:
        Malformed: it is damaged, or of another format.
    """
    if kind == "mds":
        with open(path, "rb") as file, _mds_bytes(path, file) as data:  # noqa: PTH123  as for Arrow
            columns, _ = header(data)
        kinds = dict(zip(columns.names, columns.encodings, strict=True))
        return TableColumns(kinds=kinds, texts=text_columns_of(columns))
    try:
        if kind == "csv":
            return _columns_of_csv(path)
        if kind == "parquet":
            return columns_in(pq.read_schema(path))
        with open(path, "rb") as file, _mapped(file) as source:  # noqa: PTH123
            return columns_in(_arrow_reader(source).schema)
    except (pa.ArrowException, OSError, UnicodeDecodeError, BrokenCsv, *BROKEN_STREAM) as error:
        raise Malformed(str(error).partition("\n")[0]) from None


def _columns_of_csv(path: str) -> TableColumns:
    with open(path, "rb") as file:  # noqa: PTH123  streams close what they read from
        pieces = as_utf8(chunks(open_stream(path, file, MAX_ZSTD_LONG)))
        names = next(csv_rows(pieces, tabs=is_tsv(path), limit=2**20))
    return TableColumns(kinds=dict.fromkeys(names, "text"), texts=names)


def is_tsv(path: str) -> bool:
    """Return True if the name of a file says that tabs separate its columns."""
    return path.lower().removesuffix(".gz").removesuffix(".zst").endswith(".tsv")


def columns_in(schema: Any) -> TableColumns:  # Any: pyarrow has no types
    """Return the columns of a schema."""
    kinds = {field.name: str(field.type) for field in schema}
    return TableColumns(kinds=kinds, texts=text_columns(schema))


def arrow_batches(handle: BinaryIO, columns: Sequence[str]) -> Iterator[Any]:  # Any: pyarrow has no types
    """Yield the batches of an Arrow stream or file, of these columns alone.

    Raises:
        Malformed: the file is damaged from here on.
    """
    try:
        with _mapped(handle) as source:
            names = _arrow_reader(source).schema.names
            source.seek(0)
            fields = [names.index(column) for column in columns]
            for batch in _batches(source, pa.ipc.IpcReadOptions(included_fields=fields)):
                batch.validate(full=True)
                yield batch
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise Malformed(str(error).partition("\n")[0]) from None


def mds_rows(
    path: str, handle: BinaryIO, columns: Sequence[str], *, limit: int
) -> Iterator[tuple[bytes | int, ...]]:
    """Yield the bytes of some columns of each sample of an MDS shard; of a value above `limit`, its size.

    Raises:
        Malformed: the shard is damaged.
    """
    with _mds_bytes(path, handle) as data:
        stored, bounds = header(data)
        found = [extents(data, stored, bounds, stored.names.index(column)) for column in columns]
        of_column = [zip(places.tolist(), sizes.tolist(), strict=True) for places, sizes in found]
        for row in zip(*of_column, strict=True):
            yield tuple(size if size > limit else data[place : place + size].tobytes() for place, size in row)


@contextmanager
def _mapped(handle: BinaryIO) -> Iterator[Any]:
    try:
        content: Any = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # an empty file
        content = b""
    yield pa.BufferReader(pa.py_buffer(content))


def _arrow_reader(source: Any, options: Any = None) -> Any:
    is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
    source.seek(0)
    return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source, options=options)


def _batches(source: Any, options: Any) -> Iterator[Any]:
    reader = _arrow_reader(source, options)
    if hasattr(reader, "num_record_batches"):
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from reader


@contextmanager
def _mds_bytes(path: str, handle: BinaryIO) -> Iterator[Bytes]:
    codec = CODECS.get(path.lower().rpartition(".")[2])
    if codec is None:
        yield _as_array(handle)
        return
    with tempfile.TemporaryFile() as unpacked:
        try:
            stream, size = pa.CompressedInputStream(pa.PythonFile(handle, "r"), codec), 0
            while piece := stream.read(_PIECE):
                size += len(piece)
                if size > _LARGEST_SHARD:
                    raise Malformed("it unpacks to more than 4 GiB")
                unpacked.write(piece)
        except (pa.ArrowException, OSError) as error:
            raise Malformed(f"it cannot be unpacked: {error}") from None
        unpacked.flush()
        yield _as_array(unpacked)


def _as_array(file: Any) -> Bytes:
    try:
        return np.memmap(file, dtype=np.uint8, mode="r")
    except ValueError:  # an empty file
        return np.empty(0, dtype=np.uint8)
