"""`penstock data mix`: show the mixture of a run; tell a running job to change it."""

import argparse
import json
from pathlib import Path

from penstock.cli.ask import ask, check_timeout
from penstock.cli.data_mix_table import table
from penstock.cli.step_range import step_range
from penstock.core.errors import UsageError, nearest
from penstock.train.mixture_view import mixture_view
from penstock.train.open_run import open_run
from penstock.train.requests import Request
from penstock.train.take_up import check_possible

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
    check_timeout(arguments.timeout)
    opened = open_run(arguments.run)
    request = _request(arguments, list(opened.loader.corpora))
    if request is None:
        view = mixture_view(opened)
        print(json.dumps(view) if arguments.json else "\n".join(table(view)))
        return 0
    check_possible(opened.loader, request)
    return ask(arguments.run, request, timeout_s=arguments.timeout, as_json=arguments.json)


def _request(arguments: argparse.Namespace, corpora: list[str]) -> Request | None:
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
