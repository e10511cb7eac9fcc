"""Ask a running job to save and stop, to save now, or to train with another batch size.

A request is a file in RUN/control/. The job replies after its present step, in which all its processes
agree, and the run's record tells who asked. The command that started a stopped job resumes it; so
does an engine that starts jobs again which end with 75 (torchrun). A run of `penstock launch` stops for good;
where it trains nothing now, as it waits or starts again, it ends before its next start.
A change of the batch size lasts until the recipe plans another; the learning rate does not change with it.
Samples keep their order. A job that was killed since its last checkpoint changes again at the same step.

`penstock data mix` changes the mixture, skips samples and extends corpora; `penstock islands` resizes.

example:
  penstock control runs/first --checkpoint
  penstock control runs/first --batch-size 512 --reason "loss is noisy"
  penstock control runs/first --stop

exit codes: 0 done, or waiting for the next start; 1 refused, or no reply in time; 2 wrong usage
"""

import argparse
import json
from pathlib import Path

from penstock.cli.job_request import ask, check_timeout
from penstock.core.errors import UsageError
from penstock.launch.engines.engine import stop_between_starts
from penstock.launch.job_folder import JobFolder
from penstock.train.control.requests import ControlRequest, job_is_running
from penstock.train.inspect.open_run import recipe_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of the run")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--stop", action="store_true", help="save a checkpoint, then end the job")
    wanted.add_argument("--checkpoint", action="store_true", help="save a checkpoint now")
    wanted.add_argument("--batch-size", type=int, metavar="ROWS", help="rows of a step over all processes")
    add("--reason", default="", metavar="TEXT", help="note for the run's record")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="maximum wait; default: %(default)s")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Send the request, and wait for the reply."""
    check_timeout(arguments.timeout)
    request = ControlRequest(
        stop=arguments.stop,
        checkpoint=arguments.checkpoint,
        batch_size=arguments.batch_size,
        reason=arguments.reason,
    )
    if request.stop and not job_is_running(arguments.run):
        said = stop_between_starts(JobFolder(arguments.run))
        if said and not job_is_running(arguments.run):  # else it trains by now, and may have missed the mark
            print(json.dumps({"status": "marked", "said": said}) if arguments.json else said)
            return 0
    recipe_of(arguments.run)  # raises for an invalid folder; the corpora may be out of sight
    if request.needs_job and not job_is_running(arguments.run):
        raise UsageError(
            "No job runs on it", got=str(arguments.run), fix="A run that was stopped has its checkpoints."
        )
    return ask(arguments.run, request, timeout_s=arguments.timeout, as_json=arguments.json)
