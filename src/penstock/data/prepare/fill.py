"""Drive records through the tokenizer into shards, writing the journal as shards are finished."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np

from penstock.core.errors import CorpusError
from penstock.data.formats import Tokens
from penstock.data.prepare.documents import Document, ReadOptions, Record, Rejection, read_records
from penstock.data.prepare.folder import remove_strays
from penstock.data.prepare.inputs import shown
from penstock.data.prepare.journal import Entry, Journal, open_journal, read_journal
from penstock.data.prepare.plan import InputFile, Plan
from penstock.data.prepare.progress import OnProgress, Progress
from penstock.data.prepare.shards import ShardBuilder
from penstock.data.prepare.tokenize import Place, tokenised
from penstock.text.tokenizer import Tokenizer

OnEntries = Callable[[Sequence[Entry]], None]
"""Called with the whole journal; each entry is on disk."""


def dtype_of(tokenizer: Tokenizer) -> Literal["uint16", "uint32"]:
    """Return the smallest stored type that holds every id."""
    return "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"


def fill_shards(
    out: Path,
    plan: Plan,
    *,
    options: ReadOptions,
    tokenizer: Tokenizer,
    limit_of: Callable[[int], int],
    on_progress: OnProgress,
    on_entries: OnEntries,
) -> None:
    """Write every shard that is still missing.

    Args:
        limit_of: number of a shard -> tokens in it at most.
        on_entries: given the journal that an earlier run left and again after each new entry; the last
            time, its last entry is `done`.

    Raises:
        InputError: an input changed since the plan was made.
        CorpusError: what an earlier run left is damaged, or has another tokenizer.
        OSError: the disk is full; the folder can be continued.
    """
    entries = read_journal(out)
    last = entries[-1] if entries else Entry(tokenizer=tokenizer.fingerprint)
    if last.tokenizer != tokenizer.fingerprint:
        fix = "Use --restart to prepare the folder again, or another --out."
        raise CorpusError(f"tokenizer.json in {out} is not the one its shards were made with", fix=fix)
    shards = {entry.shard.name for entry in entries if entry.shard}
    remove_strays(out, keep=shards)
    if entries:
        on_entries(entries)
    if last.done:
        return
    dtype = np.uint16 if dtype_of(tokenizer) == "uint16" else np.uint32
    with open_journal(out, last) as journal:
        builder = ShardBuilder(dtype, limit_of=limit_of, number=len(shards))
        filler = _Filler(out, journal, builder, entries, plan=plan, on_entries=on_entries)
        on_progress(filler.progress(last.input, 0))
        places = _places(plan.files, options, last)
        for batch in tokenised(places, tokenizer.encode_batch, dtype=dtype, eos_id=tokenizer.eos_id):
            for (number, record), tokens in batch:
                filler.take(number, record, tokens)
            on_progress(filler.progress(number, record.consumed))
        filler.finish()
        on_progress(filler.progress(len(plan.files), 0))


def _places(files: Sequence[InputFile], options: ReadOptions, last: Entry) -> Iterator[Place]:
    for number in range(last.input, len(files)):
        start = last.record if number == last.input else 0
        for record in read_records(files[number], options, start=start):
            yield number, record


class _Filler:
    """The counts between two records, beside the open shard and the journal that it drives."""

    def __init__(
        self,
        out: Path,
        journal: Journal,
        builder: ShardBuilder,
        entries: list[Entry],
        *,
        plan: Plan,
        on_entries: OnEntries,
    ) -> None:
        self._out, self._journal, self._builder, self._files = out, journal, builder, plan.files
        self._entries, self._on_entries = entries, on_entries
        shards = [entry.shard for entry in entries if entry.shard]
        self._bytes_before = [0, *accumulate(file.bytes for file in plan.files)]
        self._num_shards = len(shards)
        self._tokens = sum(shard.tokens for shard in shards)
        self._documents = sum(shard.documents for shard in shards)

    def take(self, number: int, record: Record, tokens: Tokens | None) -> None:
        """Store or list the next record of input file `number`."""
        if isinstance(record.content, Document) and tokens is not None:
            if not self._builder.fits(tokens):
                self._finish_shard(number, record.index)
            self._builder.add(tokens)
            self._journal.accept(record.content)
        elif isinstance(record.content, Rejection):
            self._journal.reject(_row(self._files[number], record.index, record.content), record.content.kind)

    def finish(self) -> None:
        """Finish the last shard and declare every input read."""
        self._finish_shard(len(self._files), 0, done=True)

    def progress(self, number: int, consumed: int) -> Progress:
        """Return how far the work is after `consumed` bytes of input file `number`."""
        return Progress(
            stage="tokenise",
            done_bytes=self._bytes_before[number] + consumed,
            total_bytes=self._bytes_before[-1],
            tokens=self._tokens + self._builder.num_tokens,
            documents=self._documents + self._builder.num_documents,
            shards=self._num_shards,
            rejected=self._journal.num_rejected,
        )

    def _finish_shard(self, number: int, index: int, *, done: bool = False) -> None:
        shard = self._builder.finish(self._out, self._num_shards) if self._builder.num_documents else None
        if shard is not None:
            self._num_shards += 1
            self._tokens += shard.tokens
            self._documents += shard.documents
        self._entries.append(self._journal.append(shard, number=number, record=index, done=done))
        self._on_entries(self._entries)


def _row(file: InputFile, index: int, content: Rejection) -> dict[str, str | int]:
    place = {} if content.whole_file else {"row" if file.kind == "parquet" else "line": index + 1}
    return {"source": shown(file.path), **place, "kind": content.kind, "reason": content.reason}
