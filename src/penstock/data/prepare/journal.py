"""The journal of a preparation: what is safely on disk, and where in the inputs to go on.

One JSON line per finished shard, flushed to disk after the shard itself. A kill at any instant
leaves at most a torn last line, which is cut off; the work since the last whole line is done again
and gives the same bytes. Positions are record numbers, never byte offsets, so they hold for
compressed files as well.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from penstock.core import config
from penstock.core.errors import CorpusError, PenstockError
from penstock.core.files import sync_directory
from penstock.data.manifest import ShardEntry
from penstock.data.prepare.documents import Document

FILE = "journal.jsonl"
REJECTED_FILE = "rejected.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The state of the work after a shard."""

    tokenizer: str
    """Fingerprint of the tokenizer in use."""
    shard: ShardEntry | None = None
    """The shard just finished; None where the last record left nothing to store."""
    input: int = 0
    """Number of the input file to go on with."""
    record: int = 0
    """Number of the record in it to go on with."""
    text_bytes: int = 0
    """UTF-8 bytes of the accepted documents so far."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Rejections so far, by kind."""
    rejected_bytes: int = 0
    """Length of rejected.jsonl at this point; what lies beyond it is cut off."""
    done: bool = False
    """Every input was read to its end."""


def read_journal(folder: Path) -> list[Entry]:
    """Return the entries of a folder's journal, cutting off a torn last line.

    Raises:
        CorpusError: a line is damaged, or a shard or rejected.jsonl is not as the journal says.
    """
    path = folder / FILE
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    try:
        entries = [config.build(Entry, json.loads(line)) for line in whole.splitlines()]
    except (ValueError, TypeError, PenstockError) as error:
        raise _unusable(f"{path} is damaged ({error})") from None
    for entry in entries:
        shard = entry.shard
        if shard and (
            not (folder / shard.name).is_file() or (folder / shard.name).stat().st_size != shard.bytes
        ):
            raise _unusable(f"Finished shard {folder / shard.name} is missing or has another size")
    listed = folder / REJECTED_FILE
    if entries and entries[-1].rejected_bytes > (listed.stat().st_size if listed.is_file() else 0):
        raise _unusable(f"{listed} is missing or too short")
    return entries


class Journal:
    """Appends entries, and the list of rejections that they count, both durably.

    Args:
        journal: open for appending.
        rejected: open for appending, as long as the last entry says.
        last: the last entry written, or the counts to begin with.
    """

    def __init__(self, journal: IO[bytes], rejected: IO[bytes], last: Entry) -> None:
        self._journal, self._rejected = journal, rejected
        self._tokenizer, self._text_bytes = last.tokenizer, last.text_bytes
        self._counts, self._rejected_bytes = dict(last.rejected), last.rejected_bytes

    @property
    def num_rejected(self) -> int:
        """Rejections so far."""
        return sum(self._counts.values())

    def accept(self, document: Document) -> None:
        """Count one document."""
        self._text_bytes += document.num_bytes

    def reject(self, row: dict[str, str | int], kind: str) -> None:
        """List one rejection; it is durable with the next entry."""
        line = (json.dumps(row) + "\n").encode()
        self._rejected.write(line)
        self._rejected_bytes += len(line)
        self._counts[kind] = self._counts.get(kind, 0) + 1

    def append(self, shard: ShardEntry | None, *, number: int, record: int, done: bool) -> Entry:
        """Write an entry and return it; when this returns, it survives a power cut."""
        _flush(self._rejected)
        entry = Entry(
            tokenizer=self._tokenizer,
            shard=shard,
            input=number,
            record=record,
            text_bytes=self._text_bytes,
            rejected=dict(self._counts),
            rejected_bytes=self._rejected_bytes,
            done=done,
        )
        self._journal.write((json.dumps(config.dump(entry)) + "\n").encode())
        _flush(self._journal)
        return entry


@contextmanager
def open_journal(folder: Path, last: Entry) -> Iterator[Journal]:
    """Open a folder's journal to go on after its last entry."""
    with (folder / FILE).open("ab") as journal, (folder / REJECTED_FILE).open("ab") as rejected:
        rejected.truncate(last.rejected_bytes)
        rejected.seek(last.rejected_bytes)
        sync_directory(folder)
        yield Journal(journal, rejected, last)


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _unusable(what: str) -> CorpusError:
    return CorpusError(what, fix="Use --restart to prepare the folder again, or another --out.")
