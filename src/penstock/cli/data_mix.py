"""`penstock data mix`: show the mixture of a run; tell a running job to change it."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from penstock.cli.data_mix_table import table
from penstock.cli.step_range import step_range
from penstock.core import clock
from penstock.core.errors import UsageError, nearest
from penstock.core.units import duration
from penstock.train.mixture_view import mixture_view
from penstock.train.open_run import open_run
from penstock.train.requests import Answer, Request, job_is_running, read_answer, submit
from penstock.train.take_up import check_possible

_LOOK_EVERY_S = 0.05

EPILOG = """\
Without a request: the mixture now, what was served, every change so far and what is planned.

A request is a file in RUN/control/. The running job takes it up after the step it is in, on all its processes
at once, without a restart; where no job runs, the next start does. Of weights, what --set names gets that
share of the samples, and the other corpora keep their proportions in what is left. A change lasts until the
recipe plans other weights.

example:
  penstock data mix runs/first
  penstock data mix runs/first --set web=0.6
  penstock data mix runs/first --set web=0.6 --set code=0.4 --at-step 20000 --reason "more code"
  penstock data mix runs/first --skip-steps 1200:1210 --reason "loss spike"
  penstock data mix runs/first --extend web

exit codes: 0 done, or waiting for the next start; 1 refused, or no answer in time; 2 wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of the run")
    add("--set", action="append", default=[], metavar="CORPUS=SHARE", help="share of a corpus, 0 to 1")
    add("--at-step", type=int, metavar="N", help="with --set: hold from when N steps are taken")
    add("--skip-steps", metavar="FIRST:PAST", help="never serve the samples of these steps to come, from 1")
    add("--extend", metavar="CORPUS", help="take up the parts that were appended to a corpus")
    add("--reason", default="", metavar="TEXT", help="kept in the run's state")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="longest wait; default: %(default)s")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Show the mixture, or ask for something and wait for the answer."""
    opened = open_run(arguments.run)
    request = _request(arguments, list(opened.loader.corpora))
    if request is None:
        view = mixture_view(opened)
        print(json.dumps(view) if arguments.json else "\n".join(table(view)))
        return 0
    check_possible(opened.loader, request)
    number = submit(arguments.run, request)
    found = _answered(arguments.run, number, timeout_s=arguments.timeout)
    if found is not None:
        return _tell(arguments, number, "taken up" if found.taken_up else "refused", found.said, found)
    if job_is_running(arguments.run):
        waited = f"the job has not answered in {duration(arguments.timeout)}; it will when its step is done"
        return _tell(arguments, number, "waiting", waited, None, code=1)
    said = "no job runs on it: the request is taken up when the run is started again"
    return _tell(arguments, number, "waiting", said, None)


def _request(arguments: argparse.Namespace, corpora: list[str]) -> Request | None:
    if not arguments.timeout >= 0:
        raise UsageError("--timeout must be zero seconds or more", got=arguments.timeout)
    shares = _shares(arguments.set)
    for name in [*shares, *([arguments.extend] if arguments.extend else [])]:
        if name not in corpora:
            raise UsageError("The run has no such corpus", got=name, fix=nearest(name, corpora))
    asked = [bool(shares), arguments.skip_steps is not None, arguments.extend is not None]
    if sum(asked) > 1:
        raise UsageError(
            "--set, --skip-steps and --extend are requests of their own", fix="Give one of them."
        )
    if not any(asked):
        if arguments.at_step is not None or arguments.reason:
            raise UsageError("--at-step and --reason go with a request", fix="Add --set CORPUS=SHARE.")
        return None
    steps = arguments.skip_steps and step_range(arguments.skip_steps, option="--skip-steps")
    return Request(
        weights=shares or None,
        at_step=arguments.at_step,
        skip_steps=(steps.start, steps.stop) if steps else None,
        extend=arguments.extend,
        reason=arguments.reason,
    )


def _shares(texts: list[str]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        if name in shares:
            raise UsageError(f"--set gives corpus {name!r} two shares", got=text, fix="Give it one.")
        try:
            shares[name] = float(value)
        except ValueError:
            raise UsageError("--set takes CORPUS=SHARE", got=text, fix="Example: --set web=0.6.") from None
    return shares


def _answered(run: Path, number: int, *, timeout_s: float) -> Answer | None:
    """Wait for the answer while a job runs that can give it."""
    end = clock.monotonic() + timeout_s
    while (found := read_answer(run, number)) is None:
        if clock.monotonic() >= end or not job_is_running(run):
            return read_answer(run, number)
        clock.sleep(_LOOK_EVERY_S)
    return found


def _tell(
    arguments: argparse.Namespace,
    number: int,
    status: str,
    said: str,
    found: Answer | None,
    *,
    code: int = 0,
) -> int:
    code = 1 if status == "refused" else code
    if arguments.json:
        told = asdict(found) if found else {}
        print(json.dumps({"request": number, "status": status, "said": said, "answer": told}))
    else:
        print(f"request {number}: {said}", file=sys.stderr if code else sys.stdout)
    return code
