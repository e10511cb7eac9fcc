"""JSON-lines sink: records in a file with one consistent history.

A run that resumes from step N repeats the steps after N, so `rewind` drops their records, and a line that a
kill cut short.
"""

import json
from pathlib import Path
from typing import IO

from penstock.core.errors import InputError
from penstock.core.files import write_atomic
from penstock.obs.sinks import Record


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, without a truncated last line; [] if there is no file.

    Raises:
        InputError: an earlier line is not JSON: the file was altered, not truncated.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        record = record_of(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            fix = "Restore the file, or move it away to continue without its history."
            raise InputError(f"Line {number} of {path} is not a record", got=line[:80], fix=fix)
    return records


def record_of(line: str | bytes) -> Record | None:
    """Return the record of a line; None: it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def rewind(path: Path, *, step: int) -> None:
    """Drop the records of steps beyond `step`."""
    if path.is_file():
        kept = [json.dumps(record) for record in read_records(path) if record["step"] <= step]
        write_atomic(path, "".join(f"{line}\n" for line in kept))


class JsonLines:
    """Sink that appends to a file line by line, unbuffered."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __call__(self, record: Record) -> None:
        """Write one record."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", buffering=1, encoding="utf-8")
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """Close the file; a later record opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None
