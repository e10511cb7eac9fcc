"""Write records as shards: tokenize, fill shards, and add each finished shard to the journal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np

from penstock.core.arrays import Bits, Tokens
from penstock.core.errors import CorpusError
from penstock.core.log import EventLog
from penstock.data.corpus.manifest import ColumnEntry
from penstock.data.prepare.chat_tokens import ChatEncoder, Encoded
from penstock.data.prepare.columnar import TABULAR
from penstock.data.prepare.documents import Document, ReadOptions, Record, Rejection, read_records
from penstock.data.prepare.html import HtmlRule, is_html, tag_of_part
from penstock.data.prepare.inputs import is_code, shown
from penstock.data.prepare.journal import Journal, JournalEntry, open_journal, read_journal, remove_strays
from penstock.data.prepare.plan import TOKENISING, InputFile, OnProgress, PreparationPlan, Progress
from penstock.data.prepare.shards import ShardBuilder
from penstock.data.prepare.tokenize import OnWait, OnWhole, RecordPosition, tokenised
from penstock.text.tokenizer import Tokenizer

log = EventLog(__name__)

_WHOLE_MEMORY = 125  # bytes per byte of text, with usual tokenizers
_CHAT_MEMORY = 150  # the same with the places of the tokens

OnEntries = Callable[[Sequence[JournalEntry]], None]
"""Callback with the whole journal; every entry is on disk."""


def dtype_of(tokenizer: Tokenizer) -> Literal["uint16", "uint32"]:
    """Return the smallest stored type that fits every id."""
    return "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"


def fill_shards(
    out: Path,
    plan: PreparationPlan,
    *,
    options: ReadOptions,
    tokenizer: Tokenizer,
    limit_of: Callable[[int], int],
    on_progress: OnProgress,
    on_entries: OnEntries,
    chats: Callable[[], ChatEncoder] | None = None,
    columns: Sequence[ColumnEntry] = (),
) -> None:
    """Write all missing shards.

    Args:
        chats: opens the encoder of conversations; None: the records are texts.
        columns: columns that the encoder makes.
        limit_of: number of a shard -> its maximum number of tokens.
        on_entries: called with the journal of an earlier run and again after each new entry; the last entry
            of the last call is `done`.

    Raises:
        InputError: an input changed since the plan was made.
        CorpusError: the work of an earlier run is damaged, or used another tokenizer.
        OSError: the disk is full; the folder can be continued later.
    """
    entries = read_journal(out)
    last = entries[-1] if entries else JournalEntry(tokenizer=tokenizer.fingerprint)
    if last.tokenizer != tokenizer.fingerprint:
        fix = "Use --restart to prepare the folder again, or another --out."
        raise CorpusError(f"tokenizer.json in {out} is not the one its shards were made with", fix=fix)
    shards = {entry.shard.name for entry in entries if entry.shard}
    remove_strays(out, keep={file for entry in entries if entry.shard for file in entry.shard.files})
    if entries:
        on_entries(entries)
    if last.done:
        return
    dtype = np.uint16 if dtype_of(tokenizer) == "uint16" else np.uint32
    with open_journal(out, last) as journal:
        builder = ShardBuilder(dtype, limit_of=limit_of, number=len(shards), columns=columns)
        filler = _Filler(out, journal, builder, entries, plan=plan, on_entries=on_entries, html=options.html)
        on_progress(filler.progress(last.input, 0))
        places = _places(plan.files, options, last)
        told = partial(_say_whole, plan.files, is_chat=chats is not None)
        number, consumed = last.input, 0

        def on_wait() -> None:
            on_progress(filler.progress(number, consumed))

        for batch in _encoded(places, tokenizer, dtype, chats, on_whole=told, on_wait=on_wait):
            for (number, record), tokens, found in batch:
                filler.take(number, record, tokens, found)
            consumed = record.consumed
            on_progress(filler.progress(number, consumed))
        filler.finish()
        on_progress(filler.progress(len(plan.files), 0))


def _encoded(
    places: Iterator[RecordPosition],
    tokenizer: Tokenizer,
    dtype: type[np.uint16 | np.uint32],
    chats: Callable[[], ChatEncoder] | None,
    *,
    on_whole: OnWhole,
    on_wait: OnWait,
) -> Iterator[list[Encoded]]:
    """Yield batches of records with their tokens and columns."""
    if chats is None:
        eos_id = tokenizer.eos_id
        for batch in tokenised(
            places, tokenizer, dtype=dtype, eos_id=eos_id, on_whole=on_whole, on_wait=on_wait
        ):
            yield [(place, tokens, {}) for place, tokens in batch]
        return
    with closing(chats()) as encoder:
        encoder.check()
        yield from encoder.batches(places, dtype=dtype, on_whole=on_whole, on_wait=on_wait)


def _places(files: Sequence[InputFile], options: ReadOptions, last: JournalEntry) -> Iterator[RecordPosition]:
    for number in range(last.input, len(files)):
        start = last.record if number == last.input else 0
        for record in read_records(files[number], options, start=start):
            yield number, record


class _Filler:
    """Consumer of records: fills the open shard and keeps the counts for the journal."""

    def __init__(
        self,
        out: Path,
        journal: Journal,
        builder: ShardBuilder,
        entries: list[JournalEntry],
        *,
        plan: PreparationPlan,
        on_entries: OnEntries,
        html: HtmlRule,
    ) -> None:
        self._html = html
        self._out, self._journal, self._builder, self._files = out, journal, builder, plan.files
        self._entries, self._on_entries = entries, on_entries
        shards = [entry.shard for entry in entries if entry.shard]
        self._bytes_before = [0, *accumulate(file.bytes for file in plan.files)]
        self._num_shards = len(shards)
        self._said: set[Callable[[InputFile, int], None]] = set()
        self._tokens = sum(shard.tokens for shard in shards)
        self._documents = sum(shard.documents for shard in shards)

    def take(self, number: int, record: Record, tokens: Tokens | None, columns: Mapping[str, Bits]) -> None:
        """Store the next record of input file `number`, or list its rejection."""
        if isinstance(record.content, Document) and tokens is not None:
            if not self._builder.fits(tokens):
                self._finish_shard(number, record.index)
            self._builder.add(tokens, columns)
            if not columns:
                self._tell_of_html(number, record)
            self._journal.accept(record.content)
        elif isinstance(record.content, Rejection):
            self._journal.reject(_row(self._files[number], record.index, record.content), record.content.kind)

    def _tell_of_html(self, number: int, record: Record) -> None:
        """Log the first HTML page and the first part of one, and what becomes of them and all others."""
        content, file = record.content, self._files[number]
        if not isinstance(content, Document):
            return
        say = None
        if content.is_extracted:
            say = _say_extracted
        elif self._html == "keep":
            say = _warn_of_html if is_html(content.text, file.path) else None
        elif tag_of_part(content.text) and not is_code(file.path):
            say = _warn_of_part
        if say and say not in self._said:
            self._said.add(say)
            say(file, record.index)

    def finish(self) -> None:
        """Finish the last shard and mark every input as read."""
        self._finish_shard(len(self._files), 0, done=True)

    def progress(self, number: int, consumed: int) -> Progress:
        """Return the progress after `consumed` bytes of input file `number`."""
        return Progress(
            stage=TOKENISING,
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


def _warn_of_html(file: InputFile, index: int) -> None:
    log.warning(
        "html_as_text",
        "{source} is HTML, and is stored with its tags, as is any other page. To train on the"
        " text alone, leave --html keep out",
        source=_where(file, index),
    )


def _warn_of_part(file: InputFile, index: int) -> None:
    log.warning(
        "html_part_as_text",
        "{source} begins with a tag of HTML, but not as a page does: it is stored with its "
        "tags, as is any other such text. To train on the text alone, put <html> in front of "
        "each",
        source=_where(file, index),
    )


def _say_extracted(file: InputFile, index: int) -> None:
    log.warning(
        "html_extracted",
        "{source} is HTML: of this and any other page the main text is stored, without "
        "mark-up, menus and scripts",
        source=_where(file, index),
    )


def _say_whole(files: Sequence[InputFile], place: RecordPosition, num_bytes: int, *, is_chat: bool) -> None:
    file, index = files[place[0]], place[1].index
    found = "as the template writes it" if is_chat else "of text in which this tokenizer's rules allow no cut"
    log.info(
        "encoding_whole",
        "{source} has {size_bytes:bytes} {what}. It is encoded as a whole, on one core, in about "
        "{memory_bytes:bytes} of memory",
        source=_where(file, index),
        size_bytes=num_bytes,
        what=found,
        memory_bytes=(_CHAT_MEMORY if is_chat else _WHOLE_MEMORY) * num_bytes,
    )


def _where(file: InputFile, index: int) -> str:
    return shown(file.path) if file.kind == "text" else f"{shown(file.path)} (record {index + 1})"


def _row(file: InputFile, index: int, content: Rejection) -> dict[str, str | int]:
    place = {} if content.whole_file else {"row" if file.kind in TABULAR else "line": index + 1}
    return {"source": shown(file.path), **place, "kind": content.kind, "reason": content.reason}
