"""Convert a corpus of any format to Penstock's Arrow shards or Megatron-LM's `.bin` and `.idx`.

Shards are kept, except that larger ones than `shard_tokens` are cut between documents. So a corpus of Arrow
shards converted to Megatron-LM and back is identical, byte for byte. At most one shard is held in memory. The
result appears as a whole or not at all.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from penstock.core.arrays import Int64, Tokens
from penstock.core.errors import CorpusError, UsageError
from penstock.core.files import TOKENIZER_FILE, checksum, commit, exclusive, temporary_beside
from penstock.data.corpus.columns import write_column
from penstock.data.corpus.corpus import Corpus
from penstock.data.corpus.manifest import Manifest, ShardEntry, save_manifest
from penstock.data.corpus.open import open_corpus
from penstock.data.formats import TokenShard, probe_of
from penstock.data.formats.arrow import write_shard
from penstock.data.formats.flat_layouts import write_megatron
from penstock.storage.base import LocalStorage

Target = Literal["arrow", "megatron"]

SHARD_TOKENS = 100_000_000
_CHUNK = 2**22  # tokens whose document ends are read together
_MAX_SHARDS = 100_000  # five digits: with more, the byte order of names would not be the order of shards


def convert(
    source: str | Path,
    out: Path,
    *,
    to: Target,
    shard_tokens: int = SHARD_TOKENS,
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Manifest:
    """Convert a corpus into a new folder.

    Args:
        source: as for `open_corpus`.
        shard_tokens: larger shards are cut; a document is never cut, whatever its size.
        on_progress: called regularly with (tokens written, all tokens).

    Raises:
        UsageError: the folder exists, or shard_tokens is below 1.
        CorpusError: the corpus cannot be read, or cannot be written in that format: other tools know no
            columns, and would learn every token.
        RunLocked: another process is writing the same folder.
    """
    if shard_tokens < 1:
        raise UsageError("--shard-tokens must be at least 1", got=shard_tokens)
    if out.exists():
        raise UsageError(f"--out {out} exists", fix="Name a folder that does not, or remove it.")
    corpus = open_corpus(source)
    if corpus.columns and to != "arrow":
        raise CorpusError(
            f"Corpus {corpus.location} has columns, which {to} files cannot hold: a reader would train on "
            "every token",
            got=", ".join(corpus.columns),
            fix="Convert it with --to arrow.",
        )
    unfinished = temporary_beside(out)
    with exclusive(unfinished, purpose="data convert"):
        for path in unfinished.iterdir():  # files of a killed run
            if path.name != ".lock":
                path.unlink()
        try:
            manifest = _fill(corpus, unfinished, to=to, shard_tokens=shard_tokens, on_progress=on_progress)
            (unfinished / ".lock").unlink()
            commit(unfinished, out)
        except BaseException:  # Ctrl-C too must leave no unfinished folder
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    return manifest


def _fill(
    corpus: Corpus, folder: Path, *, to: Target, shard_tokens: int, on_progress: Callable[[int, int], None]
) -> Manifest:
    entries: list[ShardEntry] = []
    done = 0
    for index in range(len(corpus.starts) - 1):
        shard = corpus.shard(index)
        for start, stop, offsets in spans(shard, shard_tokens):
            on_progress(done, corpus.num_tokens)
            if len(entries) == _MAX_SHARDS:
                raise UsageError(
                    "Too many shards", got=_MAX_SHARDS + 1, fix="Choose a larger --shard-tokens."
                )
            tokens = shard.tokens[start:stop].astype(corpus.manifest.dtype, copy=False)
            entry = _write(folder, tokens, offsets=offsets, to=to, number=len(entries))
            columns = tuple(
                write_column(folder, entry.name, column.entry, column.values(index, start, stop))
                for column in corpus.columns.values()
            )
            entries.append(replace(entry, columns=columns))
            done += stop - start
    on_progress(done, corpus.num_tokens)
    was, tokenizer = corpus.manifest, corpus.tokenizer_path
    if tokenizer:
        shutil.copyfile(tokenizer, folder / TOKENIZER_FILE)
    manifest = Manifest(
        format=to,
        dtype=was.dtype,
        vocab_size=was.vocab_size,
        eos_id=was.eos_id,
        tokenizer=was.tokenizer if tokenizer else None,
        text_bytes=was.text_bytes,
        rejected=was.rejected,
        columns=tuple(column.entry for column in corpus.columns.values()),
        shards=tuple(entries),
    )
    save_manifest(folder, manifest)
    return manifest


def _write(folder: Path, tokens: Tokens, *, offsets: Int64, to: Target, number: int) -> ShardEntry:
    path = folder / f"shard-{number:05d}.{'arrow' if to == 'arrow' else 'bin'}"
    writer = write_shard if to == "arrow" else write_megatron
    writer(path, tokens, offsets)
    for written in folder.glob(f"{path.stem}.*"):
        with written.open("rb") as file:
            os.fsync(file.fileno())
    return ShardEntry(
        name=path.name,
        tokens=len(tokens),
        documents=len(offsets) - 1,
        bytes=path.stat().st_size,
        checksum=checksum(path),
        probe=probe_of(to, LocalStorage(folder), path.name),
    )


def spans(shard: TokenShard, limit: int) -> Iterator[tuple[int, int, Int64]]:
    """Cut a shard between documents into spans of at most `limit` tokens, or of one larger document.

    Yields:
        first token, past-the-last token, and the offsets of the documents in the span: [documents + 1] int64,
        from 0 to its tokens. Empty documents are included, also those before the first token.
    """
    windows = [(at, min(at + _CHUNK, shard.num_tokens)) for at in range(0, shard.num_tokens, _CHUNK)]
    leading = shard.num_documents - sum(len(shard.document_ends(*window)) for window in windows)
    start = last = 0
    held: list[Int64] = [np.zeros(1 + leading, np.int64)]
    for window in windows:
        ends = shard.document_ends(*window)
        while (fit := int(ends.searchsorted(start + limit, "right"))) < len(ends):
            if fit == 0 and last == start:
                fit = 1  # a document larger than a shard
            if fit:
                held.append(ends[:fit] - start)
                ends, last = ends[fit:], int(ends[fit - 1])
            yield start, last, np.concatenate(held)
            start, held = last, [np.zeros(1, np.int64)]
        if len(ends):
            held.append(ends - start)
            last = int(ends[-1])
    if last != shard.num_tokens:
        raise CorpusError(
            f"The documents of a shard end at token {last:,} of {shard.num_tokens:,}",
            fix="Run `penstock data verify` on the corpus.",
        )
    if sum(map(len, held)) > 1:
        yield start, last, np.concatenate(held)
