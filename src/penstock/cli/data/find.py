"""`penstock data find`: the steps of a run that train on a document."""

import argparse
import json
from dataclasses import asdict

from rich.console import Console

from penstock.cli.options import OutputOptions, RunOptions, add_fields, options_of, step_range
from penstock.core.errors import UsageError
from penstock.train.inspect.open_run import open_run

_SHOWN = 50

EPILOG = """\
A document is named by its corpus and its number, counted from 0 over the shards of the corpus in their
order; `penstock data where` prints such names. Future steps are included, as they will be if nothing is
changed until then.

example:
  penstock data find runs/first --document web:12345
  penstock data find runs/first --document web:12345 --steps 1:2000 --json

exit codes: 0 found or not, 1 a corpus or checkpoint cannot be read, 2 unknown run, corpus or document
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_fields(parser, RunOptions)
    parser.add_argument("--document", required=True, metavar="CORPUS:N", help="the document")
    parser.add_argument("--steps", metavar="FIRST:PAST", help="steps to search; default: all of the recipe")
    add_fields(parser, OutputOptions)


def run(arguments: argparse.Namespace) -> int:
    """Print the rows that train on a document."""
    corpus, _, number = arguments.document.rpartition(":")
    if not corpus or not number.isdecimal():
        raise UsageError(
            "--document takes CORPUS:NUMBER", got=arguments.document, fix="Example: --document web:12345."
        )
    opened = open_run(options_of(arguments, RunOptions).run)
    steps = range(1, opened.steps + 1)
    if arguments.steps is not None:
        steps = step_range(arguments.steps, option="--steps")
        opened.check_step(steps[-1])
    with Console(stderr=True).status("searching"):
        uses = opened.loader.find(corpus, int(number), steps=range(steps.start - 1, steps.stop - 1))
    taken = opened.steps_taken()
    found = [
        {**asdict(use), "step": use.step + 1, "epoch": use.epoch + 1, "taken": use.step < taken}
        for use in uses
    ]
    if options_of(arguments, OutputOptions).json:
        print(json.dumps({"document": arguments.document, "steps_taken": taken, "uses": found}))
        return 0
    for use in found[:_SHOWN]:
        past = use["offset"] + use["tokens"]
        when = "" if use["taken"] else "  to come"
        print(
            f"step {use['step']:,}  row {use['row']}  tokens {use['offset']:,} to {past - 1:,}  "
            f"epoch {use['epoch']}{when}"
        )
    if len(found) > _SHOWN:
        print(f"and {len(found) - _SHOWN:,} more; --json lists them all")
    if not found:
        where = f"step from {steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"row of step {steps[0]:,}"
        print(f"No {where} trains on {arguments.document}.")
    return 0
