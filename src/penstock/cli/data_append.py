"""`penstock data append`: add inputs to a corpus as one more part."""

import argparse
import json
import sys
from pathlib import Path

from penstock.cli.data_prepare import (
    EXIT_INTERRUPTED,
    EXIT_RESUMABLE,
    Terminated,
    Watch,
    add_reading_options,
    as_json,
    as_text,
    raising_on_sigterm,
    selection_of,
)
from penstock.cli.data_progress import Display
from penstock.core.clock import monotonic
from penstock.core.units import plural
from penstock.data.manifest import tokenizer_at
from penstock.data.prepare import PrepareConfig
from penstock.data.prepare.append import append, tokenizer_of
from penstock.data.prepare.folder import APPEND_FOLDER

EPILOG = """\
The inputs are tokenised with the corpus's own tokenizer.json into new shards, which become one part of
the corpus by a single rename: whoever reads it sees the old corpus or the new one. The parts before keep
their bytes and their fingerprint, so a run that trains on the corpus resumes as it was, and reads the
new part when it is told to (loader.extend_corpus). Inputs are as for `penstock data prepare`.

What is rejected is listed in DIR/rejected-N.jsonl for part N. With more of it than --max-errors nothing
is appended. A run that is stopped or killed is continued by the same command.

example:
  penstock data append corpus news-2025.jsonl.zst
  penstock data append corpus more/ --max-errors 10 --json

exit codes: 0 done, 1 failed, 2 wrong usage, 75 terminated and 130 interrupted (run again to continue)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("corpus", type=Path, metavar="DIR", help="folder of the corpus")
    add("inputs", nargs="+", metavar="INPUT", help="files and folders, in reading order")
    add("--tokenizer", type=tokenizer_at, metavar="PATH",
        help="the tokenizer.json the corpus was made with, where it came without")  # fmt: skip
    add_reading_options(parser)
    add("--restart", action="store_true", help="begin again where an earlier append was left unfinished")
    add("--json", action="store_true", help="print the summary as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Append to a corpus and print what came to it."""
    corpus, began = arguments.corpus, monotonic()
    config = PrepareConfig(
        tokenizer=tokenizer_of(corpus, arguments.tokenizer),
        shard_tokens=arguments.shard_tokens,
        text_column=arguments.text_column,
        max_document_bytes=arguments.max_document_bytes,
        max_errors=arguments.max_errors,
    )
    with Display() as display:
        watch = Watch(display)
        try:
            with raising_on_sigterm():
                done = append(
                    corpus,
                    arguments.inputs,
                    config=config,
                    selection=selection_of(arguments),
                    restart=arguments.restart,
                    on_progress=watch.show,
                )
        except (KeyboardInterrupt, Terminated) as stop:
            interrupted = isinstance(stop, KeyboardInterrupt)
            print(
                f"penstock: {'Interrupted' if interrupted else 'Terminated'}. Nothing was appended yet. "
                f"Finished shards in {corpus / APPEND_FOLDER}: {watch.latest.shards:,}; the same "
                f"command{' without --restart' if arguments.restart else ''} continues.",
                file=sys.stderr,
            )
            return EXIT_INTERRUPTED if interrupted else EXIT_RESUMABLE
    seconds, parts = monotonic() - began, len(done.corpus.part_ends)
    if done.same_as is not None:
        print(
            f"penstock: Part {done.same_as} holds the same tokens: the corpus has them twice now.",
            file=sys.stderr,
        )
    if arguments.json:
        added = as_json(corpus, done.added, seconds=seconds)
        whole = {"part": parts - 1, "corpus_tokens": done.corpus.num_tokens, "parts": parts}
        more = {"fingerprint": done.corpus.fingerprint, "same_as": done.same_as}
        print(json.dumps({**added, **whole, **more}))
        return 0
    lines = list(as_text(corpus, done.added, seconds=seconds, new_tokens=watch.new_tokens))
    print(f"{corpus} has a new part:")
    print("\n".join(lines[1:-1]).replace("rejected.jsonl", f"rejected-{parts - 1}.jsonl"))
    print(f"in all: {plural(parts, 'part')}, {plural(done.corpus.num_tokens, 'token')}.")
    return 0
