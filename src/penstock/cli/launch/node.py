"""`penstock launch node`: run one node of a step."""

import argparse
import os
import sys
from dataclasses import dataclass
from typing import Annotated

from penstock.cli.options import RunOptions, add_fields, options_of
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Options of a node of a step."""

    attempt: Annotated[str, "NAME"]
    """Name of the attempt, for its report."""
    host: Annotated[str, "ADDRESS"] = ""
    """Address of the rendezvous. Empty: Slurm's."""
    port: int
    """Port of the rendezvous."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fields(parser, RunOptions)
    add_fields(parser, NodeOptions)


def run(arguments: argparse.Namespace) -> int:
    """Run the node to its end."""
    from penstock.launch.engines.slurm_steps import run_node

    options = options_of(arguments, NodeOptions)
    folder = JobFolder(options_of(arguments, RunOptions).run.absolute())
    spec = folder.spec()
    code = run_node(
        spec,
        folder,
        work_of(spec),
        explain,
        attempt=options.attempt,
        host=options.host,
        port=options.port,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the rendezvous may still be there
