"""Let a running job go on with more or fewer islands.

Islands are copies of the model that train by themselves and meet now and then (docs/diloco.md). The job must
be one of `penstock train --processes`, with outer.min_islands in its recipe. It answers at once. When all
islands have met it saves, and its processes start anew, as many as so many islands need. No sample is lost or
repeated.

example:
  penstock islands runs/first 4

exit codes: 0 taken up; 1 refused, or no answer in time; 2 wrong usage
"""

import argparse
from pathlib import Path

from penstock.cli.ask import ask, check_timeout
from penstock.core.errors import UsageError
from penstock.train.open_run import open_run
from penstock.train.requests import Request, job_is_running


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of the run")
    add("islands", type=int, metavar="N", help="islands to go on with")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="longest wait; default: %(default)s")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Ask, and wait for the answer."""
    check_timeout(arguments.timeout)
    request = Request(islands=arguments.islands)
    open_run(arguments.run)  # says what is wrong with the folder
    if not job_is_running(arguments.run):
        raise UsageError(
            "No job runs on it",
            got=str(arguments.run),
            fix="Start it with --processes for as many islands as you want.",
        )
    return ask(arguments.run, request, timeout_s=arguments.timeout, as_json=arguments.json)
