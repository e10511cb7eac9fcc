"""`penstock launch node`: run one node of a step."""

import argparse
import os
import sys
from pathlib import Path

from penstock.cli.streams import explain
from penstock.cli.training_job import work_of
from penstock.launch.job_folder import JobFolder

EPILOG = """\
srun types this, once on each node; the node's ranks are forked from it and end with it.

example:
  penstock launch node /shared/runs/first --attempt 7.0.1 --host node1 --port 29400

exit codes: 0 finished, 1 failed, 2 wrong recipe or usage, 75 stopped after saving, 76 several starts in a
row without a new checkpoint
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--attempt", required=True, metavar="NAME", help="name of the attempt, for its report"
    )
    parser.add_argument(
        "--host", default="", metavar="ADDRESS", help="address of the rendezvous; default: Slurm's"
    )
    parser.add_argument("--port", type=int, required=True, metavar="N", help="port of the rendezvous")


def run(arguments: argparse.Namespace) -> int:
    """Run the node to its end."""
    from penstock.launch.engines.slurm_steps import run_node

    folder = JobFolder(arguments.run.absolute())
    spec = folder.spec()
    code = run_node(
        spec,
        folder,
        work_of(spec),
        explain,
        attempt=arguments.attempt,
        host=arguments.host,
        port=arguments.port,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the rendezvous may still be there
