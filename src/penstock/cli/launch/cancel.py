"""`penstock launch cancel`: stop a launched run for good."""

import argparse

from penstock.cli.options import RunOptions, add_fields, options_of
from penstock.launch.engines.engine import ENGINES
from penstock.launch.job_folder import JobFolder

EPILOG = """\
The run saves a checkpoint first, and does not go back into the queue. Launch it again to continue.

example:
  penstock launch cancel runs/first
  penstock launch cancel runs/first --now

exit codes: 0 stopped, 1 it had ended, does not end, or (on this machine) was killed before it saved, 2 the
run was not launched
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fields(parser, RunOptions)
    parser.add_argument("--now", action="store_true", help="kill it without saving")


def run(arguments: argparse.Namespace) -> int:
    """Stop the run."""
    folder = JobFolder(options_of(arguments, RunOptions).run.absolute())
    job = folder.job()
    print(ENGINES[job.engine].cancel(job, folder, now=arguments.now))
    return 0
