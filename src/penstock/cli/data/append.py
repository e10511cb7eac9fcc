"""`penstock data append`: add inputs to a corpus as a new part."""

import argparse
import json
from pathlib import Path

from penstock.cli.data.prepare import (
    PrepareProgress,
    Terminated,
    add_reading_options,
    as_json,
    as_text,
    raising_on_sigterm,
    selection_of,
    settings_of,
    stopped,
)
from penstock.cli.progress import Display
from penstock.cli.streams import warn
from penstock.core.clock import monotonic
from penstock.core.units import plural
from penstock.data.corpus.manifest import tokenizer_at
from penstock.data.prepare import PrepareConfig
from penstock.data.prepare.append import append, tokenizer_of
from penstock.data.prepare.journal import APPEND_FOLDER

EPILOG = """\
The inputs are tokenised with the corpus's own tokenizer.json into new shards, which become one part of
the corpus by a single rename: readers see the old corpus or the new one. Earlier parts keep their bytes
and their fingerprint, so a run that trains on the corpus resumes unchanged, and uses the new part when it
is extended (loader.extend_corpus). Inputs are as for `penstock data prepare`.

Rejected inputs are listed in DIR/rejected-N.jsonl for part N. With more of them than --max-errors nothing
is appended. A run that was stopped or killed is continued by the same command.

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
        help="the tokenizer.json of the corpus, if the corpus has none")  # fmt: skip
    add_reading_options(parser)
    add("--restart", action="store_true", help="discard an unfinished append and start again")
    add("--json", action="store_true", help="print the summary as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Append to a corpus and print a summary."""
    corpus, began = arguments.corpus, monotonic()
    config = PrepareConfig(tokenizer=tokenizer_of(corpus, arguments.tokenizer), **settings_of(arguments))
    with Display() as display:
        watch = PrepareProgress(display)
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
            return stopped(
                stop,
                corpus / APPEND_FOLDER,
                watch,
                restart=arguments.restart,
                note="Nothing was appended yet. ",
            )
    seconds, parts = monotonic() - began, len(done.corpus.part_ends)
    if done.same_as is not None:
        warn(f"Part {done.same_as} has the same tokens: the corpus now has them twice.")
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
