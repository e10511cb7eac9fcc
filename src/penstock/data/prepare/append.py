"""Append inputs to a finished corpus, as one more part: all of it or nothing.

The inputs are prepared as a corpus of their own in a hidden folder inside the corpus, with everything that
a preparation can do: be killed, be continued, list what it rejects. Then its shards get a second name among
those of the corpus, and one rename of the manifest makes them part of it. Until then a reader sees the old
corpus; the parts that were there before are not touched, nor is their fingerprint changed.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from penstock.core.errors import CorpusChanged, CorpusError, UsageError
from penstock.core.files import checksum, commit, exclusive, remove_tree, temporary_beside, write_atomic
from penstock.data.manifest import TOKENIZER_FILE, Manifest, load_manifest, save_manifest
from penstock.data.prepare import journal, plan
from penstock.data.prepare.folder import APPEND_FOLDER, remove_strays
from penstock.data.prepare.inputs import Selection
from penstock.data.prepare.plan import PrepareConfig
from penstock.data.prepare.progress import OnProgress
from penstock.data.prepare.run import Summary, prepare
from penstock.data.prepare.shards import shard_name

_BASE = "base"
"""In the folder of the work: the fingerprint of the corpus before the append."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """What an append did."""

    corpus: Manifest
    """The corpus with its new part."""
    added: Summary
    """What was prepared; its manifest describes the new part alone."""

    @property
    def same_as(self) -> int | None:
        """The first part that holds the tokens of the new one, which are there twice now; None: none does."""
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
    """Add inputs to a corpus as one part, or go on where an earlier run of the same arguments stopped.

    Args:
        paths: files and folders, in reading order.
        config: how to prepare them; its tokenizer must be the corpus's, see `tokenizer_of`.
        restart: delete what an append left unfinished first.
        on_progress: called now and then, from this thread.

    Raises:
        CorpusError: the corpus cannot be added to, or an append of other arguments is unfinished.
        UsageError, InputError: as `prepare`.
        RunLocked: another process is writing to this corpus.
    """
    work = corpus / APPEND_FOLDER
    load_manifest(corpus)
    with exclusive(corpus, purpose="data append"):
        old = load_manifest(corpus)
        check_can_grow(corpus, old)
        remove_strays(corpus, keep={shard.name for shard in old.shards})
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
        added = prepared()
        new = _with_part(old, added.manifest)
        _adopt(corpus, work, new, part=len(old.part_ends))
        save_manifest(corpus, new)
        remove_tree(work)
    return Appended(corpus=new, added=added)


def check_can_grow(corpus: Path, manifest: Manifest) -> None:
    """Refuse a corpus that nothing can be appended to.

    Raises:
        CorpusError: it is still being prepared, or another tool's.
    """
    if manifest.streamed_parts == 0:
        raise CorpusError(
            f"Corpus {corpus} is still being prepared", fix="Let `penstock data prepare` finish it first."
        )
    if manifest.format != "arrow":
        raise CorpusError(
            f"Corpus {corpus} is of format {manifest.format}; only Penstock's own can be appended to",
            fix="Convert it with `penstock data convert`, or prepare the inputs as a corpus of their own.",
        )


def tokenizer_of(corpus: Path, given: Path | None) -> Path:
    """Return the tokenizer to append with: the corpus's own, or the same one from elsewhere.

    Args:
        given: a tokenizer.json to use, for a corpus that came without its own.

    Raises:
        CorpusError: there is none, or not the one the corpus was made with.
    """
    manifest, own = load_manifest(corpus), corpus / TOKENIZER_FILE
    if manifest.tokenizer is None:
        raise CorpusError(
            f"Corpus {corpus} does not say which tokenizer it was made with",
            fix="Prepare the inputs as a corpus of their own, and mix the two.",
        )
    path = given or own
    if not path.is_file():
        if given:
            state = "is a folder" if given.is_dir() else "does not exist"
            raise UsageError(f"Tokenizer {given} {state}", fix="Give the path of a tokenizer.json.")
        raise CorpusError(
            f"Corpus {corpus} has no {TOKENIZER_FILE}",
            fix="Give the one it was made with by --tokenizer FILE.",
        )
    if (found := checksum(path)) != manifest.tokenizer:
        raise CorpusError(
            f"{path} is not the tokenizer that corpus {corpus} was made with: its checksum is "
            f"{found[:16]}, the manifest says {manifest.tokenizer[:16]}",
            fix="Give the right one by --tokenizer FILE.",
        )
    return path


def _with_part(old: Manifest, added: Manifest) -> Manifest:
    """Return a corpus's manifest with the shards of another as one more part."""
    first = len(old.shards)
    shards = [replace(shard, name=shard_name(first + index)) for index, shard in enumerate(added.shards)]
    return replace(
        old,
        text_bytes=old.text_bytes + added.text_bytes if old.text_bytes else 0,
        rejected=old.rejected + added.rejected,
        shards=(*old.shards, *shards),
        parts=(*old.part_ends, first + len(shards)),
    )


def _is_adopted(old: Manifest, work: Path) -> bool:
    """Whether what was prepared is the corpus's last part already: then the corpus is not what it was."""
    base, before = work / _BASE, len(old.part_ends) - 1
    return base.is_file() and before > 0 and base.read_text() == old.first_parts(before).fingerprint


def _adopt(corpus: Path, work: Path, new: Manifest, *, part: int) -> None:
    """Give the files of a part their names in the corpus; the manifest does not know them yet."""
    first = new.part_ends[part - 1]
    for index, shard in enumerate(new.shards[first:]):
        _link(work / shard_name(index), corpus / shard.name)
    for name in (plan.FILE, journal.REJECTED_FILE):
        if (work / name).is_file() and (work / name).stat().st_size:
            _link(work / name, corpus / part_file(name, part))


def part_file(name: str, part: int) -> str:
    """Return the name that a file of an appended part has in the corpus.

    >>> part_file("rejected.jsonl", 1)
    'rejected-1.jsonl'
    """
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}-{part}{dot}{suffix}"


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where the file system has no such thing."""
    temporary = temporary_beside(target)
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
        with temporary.open("rb") as copied:
            os.fsync(copied.fileno())
    commit(temporary, target)
