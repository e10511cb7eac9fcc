"""`penstock data audit`: prove that a run trained on every sample of its order, once."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.core.units import plural
from penstock.train.audit import audit

EPILOG = """\
A run trained with run.log_samples=true wrote down the ids and checksums of the samples each rank
trained on. This computes the same order on one process, without interruptions, and compares.

example:
  penstock train recipe.toml --set run.log_samples=true --processes 2
  penstock data audit runs/first

exit codes: 0 every sample was trained on once and unchanged, 1 not so, 2 no logs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Audit a run."""
    columns = (TextColumn("audit"), BarColumn(), TextColumn("{task.completed}/{task.total} steps"))
    console = Console(stderr=True)
    is_seen = console.is_terminal  # elsewhere all that would be left of it is an empty line
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not is_seen
    ) as bar:
        task = bar.add_task("")
        result = audit(
            arguments.run, progress=lambda step, steps: bar.update(task, completed=step, total=steps)
        )
    if arguments.json:
        print(json.dumps(asdict(result), indent=1))
    else:
        starts = plural(len(result.ranks), "time")
        print(f"{plural(result.steps, 'step')}, started {starts} on {_listed(result.ranks)}")
        samples, tokens = plural(result.samples, "sample"), plural(result.tokens, "token")
        print(f"{samples} ({tokens}) trained on once, unchanged and in order")
        for fault in result.faults:
            print(f"FAULT {fault}")
        print(
            "PASS: nothing lost, nothing repeated"
            if not result.num_faults
            else f"FAIL: {plural(result.num_faults, 'step')}"
        )
    return 1 if result.num_faults else 0


def _listed(ranks: list[int]) -> str:
    """Name the number of processes of each start.

    >>> _listed([2, 1]), _listed([1])
    ('2 then 1 processes', '1 process')
    """
    return f"{' then '.join(map(str, ranks))} process{'' if set(ranks) == {1} else 'es'}"
