"""`penstock data replay`: write the batches of some steps of a run to files."""

import argparse
import json
from itertools import count
from pathlib import Path

from penstock.cli.options import OutputOptions, RunOptions, add_fields, options_of, step_range
from penstock.cli.progress import step_bar
from penstock.core.units import plural
from penstock.train.inspect.open_run import open_run
from penstock.train.inspect.replay import FIELDS, INDEX_FILE, replay

EPILOG = f"""\
Each step becomes step-00001200.npz, numpy's own format without pickles: the arrays
{", ".join(FIELDS)} and sample_ids,
rows of all processes in their global order. {INDEX_FILE} has the ids of the samples and the state of the
loader. Steps may be in the past or in the future.

example:
  penstock data replay runs/first --steps 1200:1210 --out spike
  python -c "import numpy; print(numpy.load('spike/step-00001200.npz')['input_ids'].shape)"

exit codes: 0 done, 1 a corpus or checkpoint cannot be read, 2 unknown run or steps, or
the folder is not empty
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_fields(parser, RunOptions)
    parser.add_argument("--steps", required=True, metavar="FIRST:PAST", help="steps, from 1; 7:9 is 7 and 8")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder to write, new or empty"
    )
    add_fields(parser, OutputOptions)


def run(arguments: argparse.Namespace) -> int:
    """Write the batches."""
    steps = step_range(arguments.steps, option="--steps")
    opened = open_run(options_of(arguments, RunOptions).run, fields=FIELDS)
    opened.check_step(steps[-1])
    done = count(1)
    with step_bar("replay") as show:
        written = replay(opened, steps, arguments.out, progress=lambda: show(next(done), len(steps)))
    if options_of(arguments, OutputOptions).json:
        print(json.dumps({"out": str(arguments.out), "steps": written}))
    else:
        print(f"{plural(len(written), 'step')} in {arguments.out}")
    return 0
