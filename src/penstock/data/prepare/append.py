"""Append inputs to a finished corpus as one more part, atomically.

The inputs are prepared as a corpus of their own in a hidden folder inside the corpus; this can be killed and
continued, and lists rejections, like any preparation. Then its shards are hard-linked into the corpus, and
one rename of the manifest makes them part of it. Until then a reader sees the old corpus; existing parts and
their fingerprint do not change.
"""

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from penstock.core.errors import CorpusChanged, CorpusError, UsageError
from penstock.core.files import (
    TOKENIZER_FILE,
    checksum,
    commit,
    exclusive,
    remove_tree,
    temporary_beside,
    write_atomic,
)
from penstock.data.corpus.manifest import (
    ChatOrigin,
    Manifest,
    ShardEntry,
    load_manifest,
    save_manifest,
)
from penstock.data.prepare import journal, plan
from penstock.data.prepare.inputs import Selection
from penstock.data.prepare.journal import APPEND_FOLDER, remove_strays
from penstock.data.prepare.plan import OnProgress, PrepareConfig
from penstock.data.prepare.run import Summary, prepare
from penstock.data.prepare.shards import shard_name

_BASE = "base"
"""File in the work folder: fingerprint of the corpus before the append."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """Result of an append."""

    corpus: Manifest
    """Manifest of the corpus with its new part."""
    added: Summary
    """Summary of the preparation; its manifest describes the new part alone."""

    @property
    def same_as(self) -> int | None:
        """First part with the same tokens as the new one, now stored twice; None: there is none."""
        ends = (0, *self.corpus.part_ends)
        parts = [[shard.checksum for shard in self.corpus.shards[a:b]] for a, b in pairwise(ends)]
        first = parts.index(parts[-1])
        return first if first < len(parts) - 1 else None


def append(
    corpus: Path,
    paths: Sequence[str],
    *,
    config: PrepareConfig,
    selection: Selection | None = None,
    restart: bool = False,
    on_progress: OnProgress = lambda _: None,
) -> Appended:
    """Append inputs to a corpus as one part, or continue an interrupted append with the same arguments.

    Args:
        paths: files and folders, in reading order.
        config: how to prepare them; its tokenizer must be the corpus's, see `tokenizer_of`.
        restart: first delete the work of an unfinished append.
        on_progress: called regularly from this thread.

    Raises:
        CorpusError: the corpus cannot be extended, or an append with other arguments is unfinished.
        UsageError, InputError: as `prepare`.
        RunLocked: another process is writing to this corpus.
    """
    work = corpus / APPEND_FOLDER
    load_manifest(corpus)
    with exclusive(corpus, purpose="data append"):
        old = load_manifest(corpus)
        check_can_grow(corpus, old)
        remove_strays(corpus, keep={file for shard in old.shards for file in shard.files})
        prepared = partial(
            prepare,
            paths,
            work,
            config=config,
            selection=replace(selection or Selection(), never=corpus),
            on_progress=on_progress,
        )
        if _is_adopted(old, work):  # an earlier run was killed after it had made its work part of the corpus
            with suppress(CorpusChanged):  # unless that run had other arguments
                added = prepared()
                remove_tree(work)
                return Appended(corpus=old, added=added)
            restart = True
        if restart:
            remove_tree(work)
        work.mkdir(exist_ok=True)
        write_atomic(work / _BASE, old.fingerprint)
        try:
            added = prepared()
        except BaseException:
            if [path.name for path in work.iterdir()] == [_BASE]:  # nothing to continue with
                remove_tree(work)
            raise
        check_columns(corpus, old, added.manifest)
        new = _with_part(old, added.manifest)
        _adopt(corpus, work, new, part=len(old.part_ends))
        save_manifest(corpus, new)
        remove_tree(work)
    return Appended(corpus=new, added=added)


def check_can_grow(corpus: Path, manifest: Manifest) -> None:
    """Refuse a corpus that cannot be appended to.

    Raises:
        CorpusError: it is still being prepared, or was made by another tool.
    """
    if manifest.streamed_parts == 0:
        raise CorpusError(
            f"Corpus {corpus} is still being prepared", fix="Let `penstock data prepare` finish it first."
        )
    if manifest.format != "arrow":
        raise CorpusError(
            f"Corpus {corpus} has format {manifest.format}; only Penstock's own can be appended to",
            fix="Convert it with `penstock data convert`, or prepare the inputs as a corpus of their own.",
        )


def check_columns(corpus: Path, old: Manifest, added: Manifest) -> None:
    """Refuse a part whose columns are not those of the corpus.

    Raises:
        CorpusError: with the columns of both.
    """
    if old.columns != added.columns:
        known, found = (", ".join(c.name for c in of.columns) or "none" for of in (old, added))
        raise CorpusError(
            f"Corpus {corpus} has the columns: {known}. The new part has: {found}",
            fix="Append what was prepared as the corpus was, or mix the two as corpora of their own.",
        )
    known, found = (_chat_of(manifest) for manifest in (old, added))
    if known != found:
        raise CorpusError(
            f"Corpus {corpus} has {known}. The new part has {found}",
            fix="Append what was prepared as the corpus was, or mix the two as corpora of their own.",
        )


def _chat_of(manifest: Manifest) -> str:
    """Return in words how the conversations of a corpus were prepared."""
    chat = manifest.chat
    if chat is None:
        return "plain text"
    return f"{chat.kind} by the template {chat.template}, trained on {chat.train_on}"


def tokenizer_of(corpus: Path, given: Path | None) -> Path:
    """Return the tokenizer for an append: the corpus's own, or an identical one given by the user.

    Args:
        given: tokenizer.json for a corpus that has none.

    Raises:
        CorpusError: there is none, or it is not the one the corpus was made with.
    """
    manifest, own = load_manifest(corpus), corpus / TOKENIZER_FILE
    if manifest.tokenizer is None:
        raise CorpusError(
            f"Corpus {corpus} does not record which tokenizer it was made with",
            fix="Prepare the inputs as a corpus of their own, and mix the two.",
        )
    path = given or own
    if not path.is_file():
        if given:
            state = f"has no {TOKENIZER_FILE}" if given.is_dir() else "does not exist"
            raise UsageError(f"Tokenizer {given} {state}", fix="Give the path of a tokenizer.json.")
        raise CorpusError(
            f"Corpus {corpus} has no {TOKENIZER_FILE}",
            fix="Give the one it was made with: --tokenizer FILE.",
        )
    if (found := checksum(path)) != manifest.tokenizer:
        raise CorpusError(
            f"{path} is not the tokenizer that corpus {corpus} was made with: its checksum is "
            f"{found[:16]}, the manifest says {manifest.tokenizer[:16]}",
            fix="Give the right one: --tokenizer FILE.",
        )
    return path


def _with_part(old: Manifest, added: Manifest) -> Manifest:
    """Return a corpus's manifest with the shards of another added as one part."""
    first = len(old.shards)
    shards = [_renamed(shard, shard_name(first + index)) for index, shard in enumerate(added.shards)]
    return replace(
        old,
        text_bytes=old.text_bytes + added.text_bytes if old.text_bytes else 0,
        rejected=old.rejected + added.rejected,
        chat=_with_counts(old.chat, added.chat),
        shards=(*old.shards, *shards),
        parts=(*old.part_ends, first + len(shards)),
    )


def _with_counts(old: ChatOrigin | None, added: ChatOrigin | None) -> ChatOrigin | None:
    if old is None or added is None:
        return old
    return replace(old, counts=dict(Counter(old.counts) + Counter(added.counts)))


def _renamed(shard: ShardEntry, name: str) -> ShardEntry:
    columns = [replace(file, name=_column_name(name, file.name)) for file in shard.columns]
    return replace(shard, name=name, columns=tuple(columns))


def _column_name(shard: str, column: str) -> str:
    """Return the name of a column's file beside a shard of another number.

    >>> _column_name("shard-00003.arrow", "shard-00000.learned")
    'shard-00003.learned'
    """
    return f"{shard.rpartition('.')[0]}.{column.rpartition('.')[2]}"


def _is_adopted(old: Manifest, work: Path) -> bool:
    """Return True if the prepared shards already are the last part of the corpus."""
    base, before = work / _BASE, len(old.part_ends) - 1
    return base.is_file() and before > 0 and base.read_text() == old.first_parts(before).fingerprint


def _adopt(corpus: Path, work: Path, new: Manifest, *, part: int) -> None:
    """Link the files of a part into the corpus; the manifest does not list them yet."""
    first = new.part_ends[part - 1]
    for index, shard in enumerate(new.shards[first:]):
        _link(work / shard_name(index), corpus / shard.name)
        for file in shard.columns:
            _link(work / _column_name(shard_name(index), file.name), corpus / file.name)
    for name in (plan.FILE, journal.REJECTED_FILE):
        if (work / name).is_file() and (work / name).stat().st_size:
            _link(work / name, corpus / part_file(name, part))


def part_file(name: str, part: int) -> str:
    """Return the name of an appended part's file in the corpus.

    >>> part_file("rejected.jsonl", 1)
    'rejected-1.jsonl'
    """
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}-{part}{dot}{suffix}"


def _link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it if the file system has no hard links."""
    temporary = temporary_beside(target)
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
        with temporary.open("rb") as copied:
            os.fsync(copied.fileno())
    commit(temporary, target)
