"""Change the number of islands of a running job.

Islands are replicas of the model that train independently and sync now and then
(docs/explanation/diloco.md). The job must be started by `penstock train --processes`, with
outer.min_islands in its recipe. It replies at once. After the next full sync it saves, and restarts with
the processes that the new number of islands needs. No sample is lost or repeated.

example:
  penstock islands runs/first 4

exit codes: 0 accepted; 1 refused, or no reply in time; 2 wrong usage
"""

import argparse
from pathlib import Path

from penstock.cli.job_request import ask, check_timeout
from penstock.core.errors import UsageError
from penstock.train.control.requests import ControlRequest, job_is_running
from penstock.train.inspect.open_run import recipe_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of the run")
    add("islands", type=int, metavar="N", help="number of islands to continue with")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="maximum wait; default: %(default)s")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Send the request, and wait for the reply."""
    check_timeout(arguments.timeout)
    request = ControlRequest(islands=arguments.islands)
    recipe_of(arguments.run)  # raises for an invalid folder; the corpora may be out of sight
    if not job_is_running(arguments.run):
        raise UsageError(
            "No job runs on it",
            got=str(arguments.run),
            fix="Start it with --processes for as many islands as you want.",
        )
    return ask(arguments.run, request, timeout_s=arguments.timeout, as_json=arguments.json)
