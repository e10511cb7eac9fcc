"""Change a running job, or show the mixture of a run.

Without a request: the present mixture, what was served, all changes so far and planned ones.

A request is a file in RUN/control/. The running job applies it after its current step, on all its processes
at once, and the run's record names the requester. If no job runs, the next start applies it, except --save,
--stop and --islands. A job that was killed since its last checkpoint applies it again at the same step.
Samples keep their order.

--stop saves and ends the job. The command that started it resumes it; so does an engine that starts jobs
again which end with 75 (torchrun). A run of `penstock launch` stops for good. If it trains nothing now, as
it waits or starts again, it ends before its next start.
--weights gives corpora that share of the samples; the others keep their proportions in the rest. Weights
and a batch size last until the recipe plans others. The learning rate does not change with the batch size.
--islands needs a job of `penstock train --processes` with outer.min_islands in its recipe. After the next
full sync the job saves, and restarts with the processes that the new number needs.

example:
  penstock control runs/first
  penstock control runs/first --save
  penstock control runs/first --weights web=0.6,code=0.4 --at-step 20000 --reason "more code"
  penstock control runs/first --batch-size 512 --reason "loss is noisy"
  penstock control runs/first --skip 1200:1210 --reason "loss spike"
  penstock control runs/first --extend web
  penstock control runs/first --islands 4
  penstock control runs/first --stop

exit codes: 0 done, or waiting for the next start; 1 refused, or no reply in time; 2 wrong usage
"""

import argparse
import getpass
import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from penstock.cli.mixture_table import table
from penstock.cli.options import (
    OutputOptions,
    RunOptions,
    add_fields,
    fields_of,
    options_of,
    shares,
    step_range,
)
from penstock.core import clock
from penstock.core.errors import UsageError
from penstock.core.units import duration
from penstock.train.control.requests import ControlReply, ControlRequest, job_is_running, read_answer
from penstock.train.control.send import send
from penstock.train.inspect.open_run import mixture_view, open_run

_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """Options from which a request is made, and of the wait for its answer."""

    weights: Annotated[tuple[str, ...], "CORPUS=SHARE"] = ()
    """Share of a corpus, 0 to 1; several with commas; a name with a comma in quotes."""
    skip: Annotated[str | None, "FIRST:PAST"] = None
    """Skip the samples of these future steps, counted from 1."""
    timeout_s: float = 600.0
    """Maximum wait."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fields(parser, RunOptions)
    wanted = parser.add_mutually_exclusive_group()
    add_fields(wanted, ControlRequest, "stop", checkpoint="--save")
    add_fields(wanted, ControlOptions, "weights")
    add_fields(wanted, ControlRequest, "batch_size", "islands")
    add_fields(wanted, ControlOptions, "skip")
    add_fields(wanted, ControlRequest, "extend")
    add_fields(parser, ControlRequest, "at_step", "reason")
    add_fields(parser, ControlOptions, "timeout_s")
    add_fields(parser, OutputOptions)


def run(arguments: argparse.Namespace) -> int:
    """Show the mixture, or send a request and wait for the reply."""
    options = options_of(arguments, ControlOptions)
    folder, as_json = options_of(arguments, RunOptions).run, options_of(arguments, OutputOptions).json
    request = _request(arguments, options)
    if request is None:
        view = mixture_view(open_run(folder))
        print(json.dumps(view) if as_json else "\n".join(table(view)))
        return 0
    sent = send(folder, replace(request, asked_by=user_name()))
    if isinstance(sent, str):
        print(json.dumps({"status": "marked", "said": sent}) if as_json else sent)
        return 0
    return _reply(folder, sent, timeout_s=options.timeout_s, as_json=as_json)


def _request(arguments: argparse.Namespace, options: ControlOptions) -> ControlRequest | None:
    """Return what is asked for; None: nothing, so the mixture is shown."""
    steps = None if options.skip is None else step_range(options.skip, option="--skip")
    fields = {
        **fields_of(arguments, ControlRequest),
        "weights": shares(options.weights, option="--weights") or None,
        "skip_steps": (steps.start, steps.stop) if steps else None,
    }
    notes = {"at_step": fields.pop("at_step"), "reason": fields.pop("reason")}
    if any(value is not None and value is not False for value in fields.values()):
        return ControlRequest(**fields, **notes)
    if notes["at_step"] is not None or notes["reason"]:
        raise UsageError("--at-step and --reason need a request", fix="Add --weights CORPUS=SHARE.")
    return None


def _reply(run: Path, number: int, *, timeout_s: float, as_json: bool) -> int:
    """Wait for the reply to a request while a job runs; return an exit code."""
    found, is_late = _answered(run, number, timeout_s=timeout_s), False
    if found is not None:
        status, said = "taken up" if found.taken_up else "refused", found.said
    elif is_late := job_is_running(run):
        status = "waiting"
        said = f"the job has not answered in {duration(timeout_s)}; it will when its step is done"
    else:
        status, said = "waiting", "no job runs on it: the request is taken up when the run is started again"
    failed = is_late or status == "refused"
    if as_json:
        told = asdict(found) if found else {}
        print(json.dumps({"request": number, "status": status, "said": said, "answer": told}))
    else:
        print(f"request {number}: {said}", file=sys.stderr if failed else sys.stdout)
    return int(failed)


def user_name() -> str:
    """Return the user's name; their id if the system has no name, as in a container with an arbitrary one."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        return f"user {os.getuid()}"


def _answered(run: Path, number: int, *, timeout_s: float) -> ControlReply | None:
    end = clock.monotonic() + timeout_s
    while (found := read_answer(run, number)) is None:
        if clock.monotonic() >= end or not job_is_running(run):
            return read_answer(run, number)
        clock.sleep(_LOOK_EVERY_S)
    return found
