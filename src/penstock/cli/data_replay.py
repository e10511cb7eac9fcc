"""`penstock data replay`: write the batches of some steps of a run to files."""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.cli.step_range import step_range
from penstock.core.units import plural
from penstock.train.open_run import open_run
from penstock.train.replay import FIELDS, INDEX_FILE, replay

EPILOG = f"""\
Each step becomes step-00001200.npz, numpy's own format without pickles: the arrays
{", ".join(FIELDS)} and sample_ids,
rows of all processes in their global order. {INDEX_FILE} holds the ids of the samples and the state of the
loader that they follow from. Steps may be past or to come.

example:
  penstock data replay runs/first --steps 1200:1210 --out spike
  python -c "import numpy; print(numpy.load('spike/step-00001200.npz')['input_ids'].shape)"

exit codes: 0 done, 1 a corpus or a checkpoint cannot be read, 2 no such run or steps, or
the folder has other files
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--steps", required=True, metavar="FIRST:PAST", help="steps, from 1; 7:9 is 7 and 8")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder to write, new or empty"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Write batches."""
    steps = step_range(arguments.steps, option="--steps")
    opened = open_run(arguments.run, fields=FIELDS)
    opened.check_step(steps[-1])
    columns = (TextColumn("replay"), BarColumn(), TextColumn("{task.completed}/{task.total} steps"))
    console = Console(stderr=True)
    is_seen = console.is_terminal  # elsewhere all that would be left of it is an empty line
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not is_seen
    ) as bar:
        task = bar.add_task("", total=len(steps))
        written = replay(opened, steps, arguments.out, progress=lambda: bar.advance(task))
    if arguments.json:
        print(json.dumps({"out": str(arguments.out), "steps": written}))
    else:
        print(f"{plural(len(written), 'step')} in {arguments.out}")
    return 0
