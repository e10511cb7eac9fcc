"""`penstock data audit`: verify that a run trained on every sample of its order, once."""

import argparse
import json
from dataclasses import asdict

from penstock.cli.options import OutputOptions, RunOptions, add_fields, options_of
from penstock.cli.progress import step_bar
from penstock.core.units import plural
from penstock.train.inspect.audit import audit

EPILOG = """\
A run trained with run.log_samples=true logs the ids and checksums of the samples that each rank trained
on. This computes the same order on one process, without interruptions, and compares.

example:
  penstock train recipe.toml --set run.log_samples=true --processes 2
  penstock data audit runs/first

A step that the guard skipped (its loss or gradient was not finite) is counted separately: its samples were
read and not trained on. Samples that were logged without checksums are compared by id only.

exit codes: 0 every sample was read once and unchanged, 1 there are faults, 2 no logs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fields(parser, RunOptions)
    add_fields(parser, OutputOptions)


def run(arguments: argparse.Namespace) -> int:
    """Audit a run."""
    run = options_of(arguments, RunOptions).run
    with step_bar("audit") as show:
        result = audit(run, progress=show)
    if options_of(arguments, OutputOptions).json:
        print(json.dumps(asdict(result), indent=1))
    else:
        starts = plural(len(result.ranks), "time")
        print(f"{plural(result.steps, 'step')}, started {starts} on {_listed(result.ranks)}")
        samples, tokens = plural(result.samples, "sample"), plural(result.tokens, "token")
        print(f"{samples} ({tokens}) trained on once, unchanged and in order")
        if result.skipped_steps:
            samples, steps = plural(result.skipped_samples, "sample"), plural(result.skipped_steps, "step")
            print(f"{samples} of {steps} that the guard skipped: read, and the weights were not changed")
        if result.unchecked_samples:
            without = plural(result.unchecked_samples, "sample")
            print(f"{without} logged without a checksum: the tokens were not compared")
        for fault in result.faults:
            print(f"FAULT {fault}")
        print(
            "PASS: nothing lost, nothing repeated"
            if not result.num_faults
            else f"FAIL: {plural(result.num_faults, 'step')}"
        )
    return 1 if result.num_faults else 0


def _listed(ranks: list[int]) -> str:
    """Return the number of processes of each start, in words.

    >>> _listed([2, 1]), _listed([1])
    ('2 then 1 processes', '1 process')
    """
    return f"{' then '.join(map(str, ranks))} process{'' if set(ranks) == {1} else 'es'}"
