"""`penstock launch supervise`: supervise a run inside its allocation."""

import argparse

from penstock.cli.options import RunOptions, add_fields, options_of
from penstock.core.signals import StopFlag
from penstock.launch.job_folder import JobFolder

EPILOG = """\
The batch script of `penstock launch slurm` types this on the first node.

example:
  penstock launch supervise /shared/runs/first

exit codes: 0 finished, 1 failed, 2 wrong recipe or usage, 75 stopped after saving: back into the queue,
76 several starts in a row without a new checkpoint
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fields(parser, RunOptions)


def run(arguments: argparse.Namespace) -> int:
    """Supervise."""
    flag = StopFlag().install()
    from penstock.launch.engines.slurm_steps import supervise

    folder = JobFolder(options_of(arguments, RunOptions).run.absolute())
    return supervise(folder.spec(), folder, flag)
