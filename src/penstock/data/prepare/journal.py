"""Journal and output folder of a preparation: the finished work, and the position to continue from.

One JSON line per finished shard, flushed to disk after the shard itself. A kill at any time leaves at most a
torn last line, which is cut off; the work since the last whole line is repeated with the same bytes as
result. Positions are record numbers, not byte offsets, so they are valid for compressed files too.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from penstock.core import config
from penstock.core.errors import CorpusChanged, CorpusError, PenstockError, UsageError
from penstock.core.files import MANIFEST_FILE, TOKENIZER_FILE, remove_tree, sync_directory
from penstock.data.corpus import manifest
from penstock.data.corpus.manifest import ShardEntry
from penstock.data.prepare import plan
from penstock.data.prepare.documents import Document
from penstock.data.prepare.plan import PreparationPlan, differences
from penstock.data.prepare.shards import shard_files
from penstock.text.chat_template import TEMPLATE_FILES

FILE = "journal.jsonl"
REJECTED_FILE = "rejected.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """State of the work after a shard."""

    tokenizer: str
    """Fingerprint of the tokenizer in use."""
    shard: ShardEntry | None = None
    """The finished shard; None if the last records had nothing to store."""
    input: int = 0
    """Number of the input file to continue with."""
    record: int = 0
    """Number of the record within it to continue with."""
    text_bytes: int = 0
    """UTF-8 bytes of the accepted documents so far."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Rejections so far, by kind."""
    counts: dict[str, int] = field(default_factory=dict)
    """Counts of conversations so far (see chat_tokens.py)."""
    rejected_bytes: int = 0
    """Length of rejected.jsonl at this point; the rest is cut off."""
    done: bool = False
    """True once every input has been read to its end."""


def read_journal(folder: Path) -> list[JournalEntry]:
    """Return the entries of a folder's journal, after cutting off a torn last line.

    Raises:
        CorpusError: a line is damaged, or a shard or rejected.jsonl does not match the journal.
    """
    path = folder / FILE
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    try:
        entries = [_entry(json.loads(line)) for line in whole.splitlines()]
    except (ValueError, TypeError, PenstockError) as error:
        raise _unusable(f"{path} is damaged ({error})") from None
    for entry in entries:
        shard = entry.shard
        sizes = {file.name: file.bytes for file in shard.columns} | {shard.name: shard.bytes} if shard else {}
        for name, size in sizes.items():
            if not (folder / name).is_file() or (folder / name).stat().st_size != size:
                raise _unusable(f"Finished shard {folder / name} is missing or has another size")
    listed = folder / REJECTED_FILE
    if entries and entries[-1].rejected_bytes > (listed.stat().st_size if listed.is_file() else 0):
        raise _unusable(f"{listed} is missing or too short")
    return entries


def _entry(raw: dict[str, Any]) -> JournalEntry:  # Any: JSON
    raw.pop("whole_texts", None)  # which every journal of November 2026 has
    return config.build(JournalEntry, raw)


class Journal:
    """Appends entries to the journal and rejections to their list, both durably.

    Args:
        journal: open for appending.
        rejected: open for appending, cut to the length in the last entry.
        last: last entry written, or the initial counts.
    """

    def __init__(self, journal: IO[bytes], rejected: IO[bytes], last: JournalEntry) -> None:
        self._journal, self._rejected = journal, rejected
        self._tokenizer, self._text_bytes = last.tokenizer, last.text_bytes
        self._counts, self._rejected_bytes = dict(last.rejected), last.rejected_bytes
        self._chat_counts = Counter(last.counts)

    @property
    def num_rejected(self) -> int:
        """Rejections so far."""
        return sum(self._counts.values())

    def accept(self, document: Document) -> None:
        """Count one document."""
        self._text_bytes += document.num_bytes
        self._chat_counts.update(document.counts)

    def reject(self, row: dict[str, str | int], kind: str) -> None:
        """List one rejection; it is durable with the next entry."""
        line = (json.dumps(row) + "\n").encode()
        self._rejected.write(line)
        self._rejected_bytes += len(line)
        self._counts[kind] = self._counts.get(kind, 0) + 1

    def append(self, shard: ShardEntry | None, *, number: int, record: int, done: bool) -> JournalEntry:
        """Write an entry and return it; it is durable when this returns."""
        _flush(self._rejected)
        entry = JournalEntry(
            tokenizer=self._tokenizer,
            shard=shard,
            input=number,
            record=record,
            text_bytes=self._text_bytes,
            rejected=dict(self._counts),
            counts=dict(self._chat_counts),
            rejected_bytes=self._rejected_bytes,
            done=done,
        )
        self._journal.write((json.dumps(config.dump(entry)) + "\n").encode())
        _flush(self._journal)
        return entry


@contextmanager
def open_journal(folder: Path, last: JournalEntry) -> Iterator[Journal]:
    """Open a folder's journal to continue after its last entry."""
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


FolderState = Literal["fresh", "half_done", "finished"]

APPEND_FOLDER = ".append"
"""Folder inside a corpus during an append (see append.py)."""


def settle(folder: Path, wanted: PreparationPlan) -> FolderState:
    """Return the state of a folder for a plan; the plan is written into an empty folder.

    Raises:
        CorpusChanged: it contains the work of another plan; the message lists the differences.
        UsageError: it contains a corpus of unknown origin.
    """
    stored = plan.load_plan(folder)
    if stored is None:
        _refuse_foreign(folder, wanted)
        plan.save_plan(folder, wanted)
        return "fresh"
    finished = (folder / MANIFEST_FILE).is_file() and manifest.load_manifest(folder).streamed_parts != 0
    if found := differences(stored, wanted):
        state = "finished" if finished else "half done"
        shown = "; ".join(found[:5]) + ("; ..." if len(found) > 5 else "")
        fix = "Use --restart to delete that corpus and prepare this one, or another --out."
        raise CorpusChanged(f"{folder} contains a {state} corpus of another plan: {shown}", fix=fix)
    return "finished" if finished else "half_done"


def clear(folder: Path, *, keep: Path | None) -> None:
    """Delete a corpus and its unfinished work; other files in the folder stay.

    Args:
        keep: a file to keep: the given tokenizer may be in this folder.
    """
    # The manifest is deleted first and the plan last, so that a kill in between leaves neither a corpus that
    # seems complete nor shards without a plan.
    names = (MANIFEST_FILE, FILE, REJECTED_FILE, TOKENIZER_FILE, *TEMPLATE_FILES)
    appended = (*folder.glob("inputs-[0-9]*.jsonl"), *folder.glob("rejected-[0-9]*.jsonl"))
    remove_tree(folder / APPEND_FOLDER)
    for path in (*(folder / name for name in names), *appended, *shard_files(folder), folder / plan.FILE):
        if keep is None or not path.exists() or not path.samefile(keep):
            path.unlink(missing_ok=True)


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """Remove what a preparation wrote if it fails with nothing finished: no shard, no trained tokenizer.

    Files that were in the folder before stay, and so does the folder if it was there.
    """
    is_new = not folder.exists()
    before = set() if is_new else set(folder.iterdir())
    if folder / plan.FILE in before:  # continues an earlier one
        yield
        return
    try:
        yield
    except BaseException:
        for path in _worthless(folder) - before:
            path.unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):  # not empty: something is worth keeping
                folder.rmdir()
        raise


def _worthless(folder: Path) -> set[Path]:
    """Return the files of a preparation that has finished nothing; none if it has finished something."""
    stored = plan.load_plan(folder) if folder.is_dir() else None
    journal = folder / FILE
    if journal.is_file() and journal.stat().st_size:
        return set()
    if stored is not None and "train-tokenizer" in stored.options and (folder / TOKENIZER_FILE).exists():
        return set()
    names = (FILE, REJECTED_FILE, TOKENIZER_FILE, *TEMPLATE_FILES, plan.FILE, ".lock")
    return {*(folder / name for name in names), *shard_files(folder)}


def remove_strays(folder: Path, *, keep: set[str]) -> None:
    """Delete shards that the journal does not list: written just before a kill."""
    for path in shard_files(folder):
        if path.name not in keep:
            path.unlink()


def rejections_by_kind(folder: Path) -> dict[str, int]:
    """Return the number of a folder's listed rejections by kind."""
    path = folder / REJECTED_FILE
    if not path.is_file():
        return {}
    with path.open("rb") as lines:
        return dict(Counter(json.loads(line)["kind"] for line in lines))


def _refuse_foreign(folder: Path, wanted: PreparationPlan) -> None:
    ours = [folder / MANIFEST_FILE, *shard_files(folder)]
    if "train-tokenizer" in wanted.options:
        ours.append(folder / TOKENIZER_FILE)
    if found := [path.name for path in ours if path.exists()]:
        fix = "Use --restart to delete it and prepare this one, or another --out."
        raise UsageError(f"{folder} already contains a corpus of unknown origin ({found[0]})", fix=fix)
