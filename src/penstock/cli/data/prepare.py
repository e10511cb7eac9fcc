"""`penstock data prepare`: options, progress and summary."""

import argparse
import json
import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

from penstock.cli.options import add_fields, fields_of
from penstock.cli.progress import Display
from penstock.cli.streams import complain
from penstock.core.clock import monotonic
from penstock.core.config import dump
from penstock.core.errors import UsageError
from penstock.core.units import duration, mib, plural, si
from penstock.data.corpus.columns import LEARNED, learned_share
from penstock.data.corpus.manifest import Manifest, tokenizer_at
from penstock.data.prepare import (
    DEFAULT_SUFFIXES,
    PLAIN_SUFFIXES,
    PrepareConfig,
    Progress,
    Selection,
    Summary,
    prepare,
)
from penstock.data.prepare.chat_tokens import CUT, DROPPED, JOINED, TURNS
from penstock.data.prepare.documents import EMPTY, NOT_ERRORS, TOO_LONG
from penstock.data.prepare.plan import TOKENISING, ChatConfig

EXIT_INTERRUPTED, EXIT_RESUMABLE = 130, 75

EPILOG = """\
inputs:
  a folder      its files with one of the suffixes of --suffix, names in byte order
  .jsonl        one JSON object a line (.jsonl.gz, .jsonl.zst, .ndjson as well)
  .csv, .tsv    one document a row below that of the column names; of a folder with --suffix .csv
  .parquet      one document a row
  a dataset     a folder of Hugging Face datasets (save_to_disk) or of MDS shards: one document a row
  with --chat   one conversation a line or row: messages (OpenAI), conversations (ShareGPT), prompt and
                completion, instruction [, input] and output (Alpaca); pairs: [prompt,] chosen, rejected;
                thumbs: prompt, completion, label. --fields OWN=KNOWN,... names fields of another name
  other files   one document each (.txt, .rst.gz, .py.zst, ...)
  HTML pages, as files or in rows, are stored as their main text: pip install 'penstock[html]'.
  Text is UTF-8, or the encoding of its byte order mark. Files and folders whose names start with a dot,
  and links to folders, are ignored. The end token is stored after each document.

rejected inputs (broken JSON, no text field, not UTF-8, too large, unreadable) are listed in
DIR/rejected.jsonl. With more of them than --max-errors no corpus is made. Documents without any text
are left out, counted and listed there too; they are not errors.

A run that was stopped or killed is continued by the same command, with the same resulting bytes.

example:
  penstock data prepare docs/ web.jsonl.zst --train-tokenizer 4096 --exclude tests --out corpus
  penstock data prepare web/ --tokenizer tokenizer.json --stream --out corpus &
  penstock data prepare chats.jsonl --chat --tokenizer models/qwen3 --out chats
  penstock data describe chats --rows 3

To train while --stream prepares: docs/how-to/grow-a-corpus.md

exit codes: 0 done, 1 failed, 2 wrong usage, 75 terminated and 130 interrupted (run again to continue)
"""


class Terminated(BaseException):
    """SIGTERM arrived; not an Exception, so that no handler on the way treats it as a failure."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="files and folders, in reading order")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the corpus; made if missing")
    add("--tokenizer", type=tokenizer_at, metavar="PATH",
        help="use this tokenizer.json, or that of this corpus, run or model")  # fmt: skip
    add_fields(parser, PrepareConfig, "train_tokenizer", "stream", "first_part_tokens", "part_tokens")
    add_reading_options(parser)
    add("--restart", action="store_true", help="delete the corpus in DIR, finished or not, and start again")
    add("--json", action="store_true", help="print the summary as JSON")


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for selecting and reading inputs, and the shard size."""
    add = parser.add_argument
    add("--chat", action="store_true",
        help="the inputs are conversations, written by the template in the tokenizer's folder")  # fmt: skip
    add_fields(
        parser,
        ChatConfig,
        *("train_on", "max_tokens", "too_long", "fields", "join_turns", "markers_as_text"),
        template="--chat-template",
    )
    add_fields(
        parser,
        PrepareConfig,
        *("shard_tokens", "text_column", "html", "max_errors", "max_document_bytes", "zstd_long"),
    )
    add("--exclude", nargs="+", action="extend", default=[], metavar="PATTERN",
        help="leave out files and folders with this name, such as tests or '*.min.js'")  # fmt: skip
    add("--suffix", nargs="+", action="extend", metavar="SUFFIX",
        help="suffixes of a folder's files to read (default, also followed by .gz or .zst: "
        f"{' '.join(PLAIN_SUFFIXES)})")  # fmt: skip


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:  # Any: of the fields' types
    """Return the fields of `PrepareConfig` that options set."""
    return {**fields_of(arguments, PrepareConfig), "chat": _chat_of(arguments)}


def _chat_of(arguments: argparse.Namespace) -> ChatConfig | None:
    given = fields_of(arguments, ChatConfig)
    if arguments.chat:
        return ChatConfig(**given)
    if wrong := [field.name for field in fields(ChatConfig) if given[field.name] != field.default]:
        option = {"template": "chat-template"}.get(wrong[0], wrong[0].replace("_", "-"))
        raise UsageError(f"--{option} is for conversations", fix="Add --chat, or leave it out.")
    return None


def run(arguments: argparse.Namespace) -> int:
    """Prepare a corpus and print a summary."""
    config = PrepareConfig(tokenizer=arguments.tokenizer, **settings_of(arguments))
    selection = selection_of(arguments)
    paths, out, restart, began = arguments.inputs, arguments.out, arguments.restart, monotonic()
    with Display() as display:
        watch = PrepareProgress(display)
        try:
            with raising_on_sigterm():
                summary = prepare(
                    paths, out, config=config, selection=selection, restart=restart, on_progress=watch.show
                )
        except (KeyboardInterrupt, Terminated) as stop:
            return stopped(stop, out, watch, restart=restart)
    seconds = monotonic() - began
    if arguments.json:
        print(json.dumps(as_json(out, summary, seconds=seconds, asked=config.train_tokenizer)))
    else:
        print(
            "\n".join(
                as_text(
                    out, summary, seconds=seconds, new_tokens=watch.new_tokens, asked=config.train_tokenizer
                )
            )
        )
    return 0


def stopped(
    stop: BaseException, folder: Path, watch: "PrepareProgress", *, restart: bool, note: str = ""
) -> int:
    """Say what a stopped preparation left in a folder; return the exit code."""
    interrupted = isinstance(stop, KeyboardInterrupt)
    again = "the same command" + (" without --restart" if restart else "")
    left = f"Finished shards in {folder}: {watch.latest.shards:,}; {again} continues."
    if not folder.exists():
        left = "Nothing was finished, and nothing is left."
    complain(f"{'Interrupted' if interrupted else 'Terminated'}. {note}{left}")
    return EXIT_INTERRUPTED if interrupted else EXIT_RESUMABLE


def selection_of(arguments: argparse.Namespace) -> Selection:
    """Return the selection of a folder's files, from --suffix and --exclude."""
    suffixes = tuple(f".{s.lower().removeprefix('.')}" for s in arguments.suffix or DEFAULT_SUFFIXES)
    return Selection(suffixes=suffixes, exclude=tuple(arguments.exclude))


class PrepareProgress:
    """Shows progress, and keeps the latest report."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._first: Progress | None = None
        self.latest = Progress(stage="start")

    @property
    def new_tokens(self) -> int:
        """Tokens made by this process; an earlier, interrupted one may have made others."""
        return self.latest.tokens - (self._first.tokens if self._first else 0)

    def show(self, progress: Progress) -> None:
        """Handle the next progress report."""
        self.latest = progress
        tokens = None
        if progress.stage == TOKENISING:
            self._first = self._first or progress
            tokens = progress.tokens
        self._display.show(progress.stage, progress.done_bytes, progress.total_bytes or None, tokens=tokens)


def as_json(
    out: Path, summary: Summary, *, seconds: float, asked: int | None = None
) -> dict[str, Any]:  # Any: what JSON can write
    """Return a summary as JSON values.

    Args:
        asked: requested number of tokenizer entries.
    """
    manifest = summary.manifest
    return {
        "corpus": str(out),
        "already_complete": summary.already_complete,
        "tokens": manifest.num_tokens,
        "documents": manifest.num_documents,
        "shards": len(manifest.shards),
        "parts": len(manifest.part_ends),
        "bytes": sum(shard.bytes for shard in manifest.shards),
        "text_bytes": manifest.text_bytes,
        "inputs": summary.num_inputs,
        "input_bytes": summary.input_bytes,
        "rejected": manifest.rejected,
        "rejected_by_kind": summary.rejected,
        "passed_over": dict(summary.skipped),
        "dtype": manifest.dtype,
        "vocab_size": manifest.vocab_size,
        "vocab_size_asked": asked,
        "eos_id": manifest.eos_id,
        "fingerprint": manifest.fingerprint,
        **learned_of(manifest),
        "seconds": round(seconds, 3),
    }


def as_text(
    out: Path, summary: Summary, *, seconds: float, new_tokens: int, asked: int | None = None
) -> Iterator[str]:
    """Yield a summary as text lines; `asked` as in `as_json`."""
    manifest = summary.manifest
    size = sum(shard.bytes for shard in manifest.shards)
    if summary.already_complete:
        yield f"{out} is already complete; nothing to do."
    else:
        yield f"{out} is complete: {duration(seconds)}, {si(new_tokens / max(seconds, 1e-3))} tokens/s."
    yield f"  tokens       {manifest.num_tokens:,} ({manifest.dtype})"
    yield f"  shards       {len(manifest.shards):,}, {mib(size)}"
    if len(manifest.part_ends) > 1:
        yield f"  parts        {len(manifest.part_ends):,}"
    yield f"  documents    {manifest.num_documents:,}, {mib(manifest.text_bytes)} of text"
    yield from learned_lines(manifest)
    yield f"  inputs       {summary.num_inputs:,} files, {mib(summary.input_bytes)}"
    if empty := summary.rejected.get(EMPTY, 0):
        yield f"  left out     {plural(empty, 'document')} without text, listed in {out / 'rejected.jsonl'}"
    if dropped := summary.rejected.get(TOO_LONG, 0):
        yield f"  left out     {plural(dropped, 'conversation')} longer than --max-tokens, listed there too"
    if wrong := {kind: n for kind, n in sorted(summary.rejected.items()) if kind not in NOT_ERRORS}:
        kinds = ", ".join(f"{kind.replace('_', ' ')}: {n:,}" for kind, n in wrong.items())
        yield f"  rejected     {sum(wrong.values()):,} ({kinds}), listed in {out / 'rejected.jsonl'}"
    if summary.skipped:
        kinds = ", ".join(f"{reason}: {n:,}" for reason, n in summary.skipped.most_common(4))
        more = ", ..." if len(summary.skipped) > 4 else ""
        yield f"  passed over  {summary.skipped.total():,} entries of folders ({kinds}{more})"
    end = "no end token between documents" if manifest.eos_id is None else f"end token {manifest.eos_id}"
    yield f"  vocabulary   {manifest.vocab_size:,}, {end}"
    if asked and manifest.vocab_size < asked:
        yield f"               requested {asked:,}, the text yields {manifest.vocab_size:,}"
    yield f"next: penstock data describe {shlex.quote(str(out))}"


def learned_of(manifest: Manifest) -> dict[str, Any]:  # Any: what JSON can write
    """Return the counts of learned tokens as JSON values; empty for plain text."""
    chat = manifest.chat
    found = {} if (learned := manifest.count(LEARNED)) is None else {"learned_tokens": learned}
    return found if chat is None else {**found, "chat": dump(chat)}


def learned_lines(manifest: Manifest) -> Iterator[str]:
    """Yield lines about the learned tokens; none for plain text."""
    if (learned := learned_share(manifest)) is not None:
        yield f"  learned      {learned}"
    if (chat := manifest.chat) is not None:
        counts = chat.counts
        turns = plural(counts.get(TURNS, 0), "assistant turn")
        yield f"  chat         {chat.kind}, {turns} learned ({chat.train_on}), template {chat.template}"
        if dropped := counts.get(DROPPED, 0):
            yield f"               the template left out reasoning or text of {plural(dropped, 'turn')}"
        if joined := counts.get(JOINED, 0):
            yield f"               joined to the turn before: {plural(joined, 'turn')}"
        if cut := counts.get(CUT, 0):
            yield f"               cut at --max-tokens: {plural(cut, 'conversation')}"


@contextmanager
def raising_on_sigterm() -> Iterator[None]:
    """Raise Terminated in the main thread when SIGTERM arrives."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # handlers can be set there only
        yield
        return
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
