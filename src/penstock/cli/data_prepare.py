"""`penstock data prepare`: its options, its progress, its summary."""

import argparse
import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from penstock.cli.data_progress import Display
from penstock.core.clock import monotonic
from penstock.core.units import duration, mib, parse_count, si
from penstock.data.manifest import tokenizer_at
from penstock.data.prepare import DEFAULT_SUFFIXES, PrepareConfig, Progress, Selection, Summary, prepare
from penstock.data.prepare.parts import FIRST_PART_TOKENS

EXIT_INTERRUPTED, EXIT_RESUMABLE = 130, 75

EPILOG = """\
inputs:
  a folder      its files with one of the suffixes of --suffix, names in byte order
  .jsonl        one JSON object a line (.jsonl.gz, .jsonl.zst, .ndjson as well)
  .parquet      one document a row
  other files   one document each (.txt, .txt.gz, .txt.zst, ...)
  Text is UTF-8, or what its byte order mark says. Files and folders whose names start with a dot,
  and links to folders, are passed over. The end token is stored after each document.

rejected inputs (broken JSON, no text field, not UTF-8, empty, too large, unreadable) are listed in
DIR/rejected.jsonl. With more of them than --max-errors no corpus is made.

A run that is stopped or killed is continued by the same command, and gives the same bytes.

example:
  penstock data prepare docs/ web.jsonl.zst --train-tokenizer 4096 --exclude tests --out corpus
  penstock data prepare web/ --tokenizer tokenizer.json --stream --out corpus &   (see docs/growing.md)

exit codes: 0 done, 1 failed, 2 wrong usage, 75 terminated and 130 interrupted (run again to continue)
"""


class Terminated(BaseException):
    """SIGTERM arrived; no Exception, so that nothing on the way takes it for a failure."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="files and folders, in reading order")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the corpus; made if missing")
    add("--tokenizer", type=tokenizer_at, metavar="PATH",
        help="use this tokenizer.json, or that of this corpus, run or model")  # fmt: skip
    add("--train-tokenizer", type=parse_count, metavar="VOCAB",
        help="train a byte-level BPE tokenizer of so many entries on up to 64 MiB of inputs")  # fmt: skip
    add_reading_options(parser)
    add("--stream", action="store_true",
        help="let training read the corpus, part by part, while it is prepared")  # fmt: skip
    add("--first-part-tokens", type=parse_count, default=FIRST_PART_TOKENS, metavar="N",
        help="with --stream: tokens of the first part; each next one has twice it (default 1M)")  # fmt: skip
    add("--part-tokens", type=parse_count, metavar="N",
        help="with --stream: tokens of the largest parts (default --shard-tokens)")  # fmt: skip
    add("--restart", action="store_true", help="delete the corpus in DIR, finished or not, and begin again")
    add("--json", action="store_true", help="print the summary as JSON")


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which inputs are read, how, and into shards of what size."""
    add = parser.add_argument
    add("--shard-tokens", type=parse_count, default=100_000_000, metavar="N",
        help="tokens a shard, held in memory (default 100M)")  # fmt: skip
    add("--text-column", default="text", metavar="NAME",
        help="field of a JSON line or column of a Parquet file (default text)")  # fmt: skip
    add("--exclude", nargs="+", action="extend", default=[], metavar="PATTERN",
        help="leave out files and folders of this name, such as tests or '*.min.js'")  # fmt: skip
    add("--suffix", nargs="+", action="extend", metavar="SUFFIX",
        help=f"files of a folder that count (default {' '.join(DEFAULT_SUFFIXES)})")  # fmt: skip
    add("--max-errors", type=parse_count, default=0, metavar="N", help="rejected inputs allowed (default 0)")
    add("--max-document-bytes", type=parse_count, default=256 * 2**20, metavar="N",
        help="reject larger documents (default 256MiB)")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Prepare a corpus and print what it holds."""
    config = PrepareConfig(
        tokenizer=arguments.tokenizer,
        train_tokenizer=arguments.train_tokenizer,
        shard_tokens=arguments.shard_tokens,
        text_column=arguments.text_column,
        max_document_bytes=arguments.max_document_bytes,
        max_errors=arguments.max_errors,
        stream=arguments.stream,
        first_part_tokens=arguments.first_part_tokens,
        part_tokens=arguments.part_tokens,
    )
    selection = selection_of(arguments)
    paths, out, restart, began = arguments.inputs, arguments.out, arguments.restart, monotonic()
    with Display() as display:
        watch = Watch(display)
        try:
            with raising_on_sigterm():
                summary = prepare(
                    paths, out, config=config, selection=selection, restart=restart, on_progress=watch.show
                )
        except (KeyboardInterrupt, Terminated) as stop:
            interrupted = isinstance(stop, KeyboardInterrupt)
            again = "the same command" + (" without --restart" if restart else "")
            print(
                f"penstock: {'Interrupted' if interrupted else 'Terminated'}. "
                f"Finished shards in {out}: {watch.latest.shards:,}; {again} continues.",
                file=sys.stderr,
            )
            return EXIT_INTERRUPTED if interrupted else EXIT_RESUMABLE
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


def selection_of(arguments: argparse.Namespace) -> Selection:
    """Return which files of a folder count, from --suffix and --exclude."""
    suffixes = tuple(f".{s.lower().removeprefix('.')}" for s in arguments.suffix or DEFAULT_SUFFIXES)
    return Selection(suffixes=suffixes, exclude=tuple(arguments.exclude))


class Watch:
    """Shows progress and remembers it."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._first: Progress | None = None
        self.latest = Progress(stage="start")

    @property
    def new_tokens(self) -> int:
        """Tokens made by this run; an earlier, stopped one may have made the rest."""
        return self.latest.tokens - (self._first.tokens if self._first else 0)

    def show(self, progress: Progress) -> None:
        """Take the next report."""
        self.latest = progress
        if progress.total_bytes:
            self._first = self._first or progress
            self._display.show(
                progress.stage, progress.done_bytes, progress.total_bytes, tokens=progress.tokens
            )
        else:  # training a tokenizer: the library does not say how far it is
            self._display.show(progress.stage, 0, None)


def as_json(
    out: Path, summary: Summary, *, seconds: float, asked: int | None = None
) -> dict[str, Any]:  # Any: what JSON can write
    """Return a summary as plain values.

    Args:
        asked: entries the tokenizer was to be trained to have.
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
        "seconds": round(seconds, 3),
    }


def as_text(
    out: Path, summary: Summary, *, seconds: float, new_tokens: int, asked: int | None = None
) -> Iterator[str]:
    """Yield a summary as lines for a person; `asked` as above."""
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
    yield f"  inputs       {summary.num_inputs:,} files, {mib(summary.input_bytes)}"
    if summary.rejected:
        kinds = ", ".join(f"{kind.replace('_', ' ')}: {n:,}" for kind, n in sorted(summary.rejected.items()))
        yield f"  rejected     {manifest.rejected:,} ({kinds}), listed in {out / 'rejected.jsonl'}"
    if summary.skipped:
        kinds = ", ".join(f"{reason}: {n:,}" for reason, n in summary.skipped.most_common(4))
        more = ", ..." if len(summary.skipped) > 4 else ""
        yield f"  passed over  {summary.skipped.total():,} entries of folders ({kinds}{more})"
    end = "no end token between documents" if manifest.eos_id is None else f"end token {manifest.eos_id}"
    yield f"  vocabulary   {manifest.vocab_size:,}, {end}"
    if asked and manifest.vocab_size < asked:
        yield f"               asked for {asked:,}, the text yields {manifest.vocab_size:,}"
    yield f"next: penstock data describe {out}"


@contextmanager
def raising_on_sigterm() -> Iterator[None]:
    """Raise Terminated in the main thread when SIGTERM arrives."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield
        return
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
