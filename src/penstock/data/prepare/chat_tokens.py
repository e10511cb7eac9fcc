"""Conversations to tokens and columns: rendered in sandboxed processes, encoded in one batch on all cores.

A document is a conversation as the model's template writes it, and nothing else: no end token is added, since
the template ends each turn. A pair is one document, the chosen conversation followed by the rejected one, so
that no packing separates them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import LifoQueue
from typing import cast

import numpy as np
import numpy.typing as npt

from penstock.core.arrays import Bits, Tokens
from penstock.core.env import num_cores
from penstock.core.errors import ModelError, PenstockError, UsageError
from penstock.core.log import EventLog
from penstock.core.units import mib
from penstock.data.corpus.columns import LEARNED, REJECTED
from penstock.data.corpus.manifest import ColumnEntry
from penstock.data.prepare.chat_records import ChatKind, Conversation, Side, conversation_of
from penstock.data.prepare.documents import TOO_LONG, Document, RawChat, Record, Rejection
from penstock.data.prepare.plan import ChatConfig
from penstock.data.prepare.tokenize import OnWait, OnWhole, RecordPosition, grouped, one_ahead, size_of_record
from penstock.text.chat_template import ChatTemplate
from penstock.text.learned_tokens import RenderedChat
from penstock.text.template_markers import markers_in, may_be_text
from penstock.text.template_process import TemplateProcess
from penstock.text.tokenizer import Tokenizer

log = EventLog(__name__)

CHAT_BYTES = 8 * 2**20
"""Largest conversation, in UTF-8 bytes as the template writes it; of a pair, both together. It is encoded
whole, with the places of its tokens. Measured at 2 MiB: 150 bytes of memory per byte with words, 377 if each
character is a token, so about 3 GiB at 8 MiB."""
_TOLD_BYTES = 2 * 2**20
_BATCH_BYTES = 2**20
_BATCH_RECORDS = 512
_MAX_PROCESSES = 8
_FEW_RECORDS = 16  # one process writes them sooner than another starts, in 0.1 s
_SYSTEM = {"role": "system", "content": "Be brief."}
_TWO_TURNS = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello."}]

Encoded = tuple[RecordPosition, Tokens | None, Mapping[str, Bits]]
"""Record, its tokens (None for a rejection), and its columns."""

DROPPED, CUT, TURNS, JOINED = "turns_with_dropped_text", "cut", "learned_turns", "joined_turns"
"""Counts of a preparation, as in the manifest's `chat`."""


def columns_of_kind(kind: str) -> tuple[ColumnEntry, ...]:
    """Return the columns of a corpus of conversations."""
    names = (LEARNED,) if kind == "conversations" else (LEARNED, REJECTED)
    return tuple(ColumnEntry(name=name, dtype="bit") for name in names)


class ChatEncoder:
    """Encoder of conversations; its processes end with `close`.

    Args:
        config: how conversations become tokens.
        kind: kind of the records.
        date: day that the template is told, YYYY-MM-DD.
        num_processes: processes that run the template; None: one per core, eight at most.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        config: ChatConfig,
        *,
        kind: ChatKind,
        date: str,
        num_processes: int | None = None,
    ) -> None:
        self._tokenizer, self._config, self._kind, self._date = tokenizer, config, kind, date
        self._declared = tuple(template.variables.values())
        self._num = num_processes or min(num_cores(), _MAX_PROCESSES)
        self._processes = [
            TemplateProcess(template, control=tokenizer.control_names) for _ in range(self._num)
        ]
        self._free: LifoQueue[TemplateProcess] = LifoQueue()  # those that have started first
        for process in reversed(self._processes):
            self._free.put(process)
        self._threads = ThreadPoolExecutor(self._num, "chat-template")

    def check(self) -> None:
        """Try the template and the vocabulary on a short conversation; warn of markers stored as text.

        Raises:
            UsageError: they do not belong together, or the template fails.
        """
        process, lacking = self._processes[0], dict[str, int]()
        try:
            texts = [process.render(_TWO_TURNS, add_generation_prompt=False)]
            with suppress(ModelError, UsageError):  # some templates have no system
                texts.append(process.render([_SYSTEM, *_TWO_TURNS], add_generation_prompt=False))
            in_pieces = self._markers_in_pieces(texts)
            if not self._config.markers_as_text:
                lacking = {name: length for name, length in in_pieces.items() if not may_be_text(name)}
            if not lacking:
                process.answers(_TWO_TURNS, date=self._date)
        except (ModelError, UsageError) as error:
            raise UsageError(
                f"A conversation of two turns cannot be written: {str(error).rstrip('.')}",
                fix="Correct the template, or give another with --chat-template FILE.",
            ) from None
        if lacking:
            raise UsageError(
                "The template writes special tokens that the vocabulary lacks",
                got=_with_lengths(lacking),
                fix="Use the tokenizer of the template's model, give another template with --chat-template "
                "FILE, or add the tokens as in docs/how-to/continue-pretraining.md, New tokens. If the model "
                "was trained on them as text, say --markers-as-text.",
            )
        if in_pieces:
            _warn_of_markers(in_pieces)

    def _markers_in_pieces(self, texts: Sequence[str]) -> dict[str, int]:
        """Return the markers in rendered texts that are several tokens each, with how many."""
        lengths: dict[str, int] = {}
        for text, (_, places) in zip(texts, self._tokenizer.encode_rendered_batch(texts), strict=True):
            for marker in markers_in(text, self._declared):
                overlaps = (places[:, 0] < marker.end()) & (places[:, 1] > marker.start())
                lengths[marker[0]] = max(lengths.get(marker[0], 0), int(overlaps.sum()))
        return {name: length for name, length in lengths.items() if length > 1}

    def batches(
        self,
        places: Iterable[RecordPosition],
        *,
        dtype: type[np.uint16 | np.uint32],
        on_whole: OnWhole = lambda _place, _bytes: None,
        on_wait: OnWait = lambda: None,
    ) -> Iterator[list[Encoded]]:
        """Yield batches of records with their tokens and columns, in the given order.

        A conversation longer than CHAT_BYTES is rejected.

        Args:
            on_whole: called before a conversation of more than 2 MiB is encoded, with its bytes.
            on_wait: called each second while a batch is encoded.
        """
        batches = grouped(places, size_of_record, most_size=_BATCH_BYTES, most=_BATCH_RECORDS)
        encoded = partial(self._encoded, dtype=dtype, on_whole=on_whole)
        yield from one_ahead(batches, encoded, on_wait=on_wait, thread="chat-tokens")

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()

    def _encoded(
        self, batch: list[RecordPosition], dtype: type[np.uint16 | np.uint32], on_whole: OnWhole
    ) -> list[Encoded]:
        records = [record for _, record in batch]
        apply = map if len(records) <= _FEW_RECORDS else self._threads.map
        written = list(apply(self._written, records))
        for place, found in zip(batch, written, strict=True):
            if isinstance(found, _Written) and (size := _size(found.rendered)) > _TOLD_BYTES:
                on_whole(place, size)
        texts = [side.text for found in written if isinstance(found, _Written) for side in found.rendered]
        encoded = iter(self._tokenizer.encode_rendered_batch(texts))
        made: list[Encoded] = []
        for (number, record), found in zip(batch, written, strict=True):
            if isinstance(found, Rejection):
                made.append(((number, replace(record, content=found)), None, {}))
                continue
            sides = [next(encoded) for _ in found.rendered]
            content, tokens, columns = self._document(found, sides)
            stored = None if tokens is None else cast("Tokens", tokens.astype(dtype))
            made.append(((number, replace(record, content=content)), stored, columns))
        return made

    def _written(self, record: Record) -> "_Written | Rejection":
        """Return a record as the template writes it, or the reason why it cannot."""
        if not isinstance(record.content, RawChat):
            assert isinstance(record.content, Rejection)
            return record.content
        try:
            found = conversation_of(
                record.content.value,
                kind=self._kind,
                last_only=self._config.train_on == "last",
                join_turns=self._config.join_turns,
            )
            tools = self._tokenizer.guarded(list(found.tools))
            process = self._free.get()
            try:
                rendered = [
                    process.answers(
                        self._tokenizer.guarded(list(side.messages)), tools=tools, date=self._date
                    )
                    for side in found.sides
                ]
            finally:
                self._free.put(process)
        except PenstockError as error:
            return Rejection("bad_conversation", str(error))
        if any(_has_half_surrogate(side.text) for side in rendered):  # of JSON in a text, such as arguments
            return Rejection("undecodable", "half a surrogate pair")
        if (size := _size(rendered)) > CHAT_BYTES:
            reason = (
                f"a conversation of {mib(size)} as the template writes it; the limit is {mib(CHAT_BYTES)}: "
                "split it, or leave it out"
            )
            return Rejection("too_large", reason)
        return _Written(found, rendered, record.content.num_bytes)

    def _document(
        self, written: "_Written", sides: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]
    ) -> tuple[Document | Rejection, npt.NDArray[np.int64] | None, Mapping[str, Bits]]:
        ids = [side[0] for side in sides]
        if len(ids) > 1 and np.array_equal(ids[0], ids[1]):
            reason = (
                f"the template writes the chosen and the rejected answer alike, in the same {len(ids[0]):,} "
                "tokens, so neither is preferred: correct one of the answers, or leave the pair out"
            )
            return Rejection("bad_conversation", reason), None, {}
        learned = [
            learned_bits(rendered, side, offsets)
            for rendered, side, (_, offsets) in zip(
                written.rendered, written.conversation.sides, sides, strict=True
            )
        ]
        tokens, bits = np.concatenate(ids), np.concatenate(learned)
        first = len(ids[0]) if len(ids) > 1 else (0 if written.conversation.is_rejected else len(tokens))
        rejected = np.arange(len(tokens)) >= first
        counts = {
            TURNS: sum(len(side.learned) for side in written.conversation.sides),
            DROPPED: sum(rendered.dropped for rendered in written.rendered),
            JOINED: written.conversation.joined,
        }
        most = self._config.max_tokens
        if most is not None and len(tokens) > most:
            if self._config.too_long != "cut" or len(ids) > 1 or not bits[:most].any():
                is_error = self._config.too_long == "refuse"
                reason = f"{len(tokens):,} tokens, and --max-tokens is {most:,}"
                return Rejection("over_long" if is_error else TOO_LONG, reason), None, {}
            tokens, bits, rejected = tokens[:most], bits[:most], rejected[:most]
            counts[CUT] = 1
            end = int(sides[0][1][most - 1, 1])  # past the last character that is left
            answers, (side,) = written.rendered[0].answers, written.conversation.sides
            counts[TURNS] = sum(one.message in side.learned and one.spans[0][0] < end for one in answers)
        if not all(each.any() for each in (learned if len(ids) > 1 else [bits])):
            reason = (
                f"no token of the assistant's turns is learned, of {len(tokens):,}: correct the template, or "
                "leave the conversation out"
            )
            return Rejection("bad_conversation", reason), None, {}
        columns = {LEARNED: bits} | ({} if self._kind == "conversations" else {REJECTED: rejected})
        text = "".join(rendered.text for rendered in written.rendered)
        counts = {name: count for name, count in counts.items() if count}
        return Document(text, written.num_bytes, counts=counts), tokens, columns


def _with_lengths(markers: Mapping[str, int]) -> str:
    """Return markers with their lengths in tokens.

    >>> _with_lengths({"<|user|>": 5, "<|system|>": 6})
    '<|user|> (5 tokens), <|system|> (6 tokens)'
    """
    return ", ".join(f"{name} ({length} tokens)" for name, length in markers.items())


def _warn_of_markers(as_text: Mapping[str, int]) -> None:
    """Log markers that are no tokens of the vocabulary, by their length in tokens."""
    log.warning(
        "markers_as_text",
        "The template writes markers that are no tokens of the vocabulary, and are stored as "
        "text: {markers}. If the model was not trained so, use the tokenizer and the template"
        " of one model",
        markers=_with_lengths(as_text),
    )


@dataclass(frozen=True, slots=True)
class _Written:
    conversation: Conversation
    rendered: Sequence[RenderedChat]
    num_bytes: int


def _size(rendered: Sequence[RenderedChat]) -> int:
    """Return the length of rendered texts in UTF-8 bytes."""
    return sum(len(side.text.encode()) for side in rendered)


def _has_half_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def learned_bits(rendered: RenderedChat, side: Side, ends: npt.NDArray[np.int64]) -> Bits:
    """Return which tokens are learned: [tokens].

    A token is learned if any of its characters belongs to an answer that is.

    Args:
        ends: [tokens, 2] first and past-the-last character of each token.
    """
    inside = np.zeros(len(rendered.text) + 1, np.int64)
    for answer in rendered.answers:
        if answer.message in side.learned:
            for first, past in answer.spans:
                inside[first + 1 : past + 1] = 1
    before = np.cumsum(inside)
    firsts, pasts = ends[:, 0], ends[:, 1]
    found: Bits = before[pasts] > before[firsts]
    for index in np.flatnonzero(pasts <= firsts).tolist():  # part of the character before
        found[index] = index > 0 and found[index - 1]
    return found
