"""`penstock data mix`: show the mixture of a run, or change that of a running job."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from penstock.cli.data.describe import printable
from penstock.cli.job_request import ask, check_timeout
from penstock.cli.options import shares, step_range
from penstock.core.errors import UsageError, nearest
from penstock.core.units import plural
from penstock.train.control.apply_request import check_possible
from penstock.train.control.requests import ControlRequest
from penstock.train.inspect.open_run import View, mixture_view, open_run

EPILOG = """\
Without a request: the present mixture, what was served, all changes so far and planned ones.

A request is a file in RUN/control/. The running job applies it after its present step, on all its processes
at once, without a restart; if no job runs, the next start does. Corpora named by --set get that share of the
samples, and the others keep their proportions in the rest. A change lasts until the recipe plans other
weights.

example:
  penstock data mix runs/first
  penstock data mix runs/first --set web=0.6
  penstock data mix runs/first --set web=0.6,code=0.4 --at-step 20000 --reason "more code"
  penstock data mix runs/first --skip-steps 1200:1210 --reason "loss spike"
  penstock data mix runs/first --extend web

exit codes: 0 done, or waiting for the next start; 1 refused, or no reply in time; 2 wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of the run")
    add(
        "--set",
        action="append",
        default=[],
        metavar="CORPUS=SHARE",
        help="share of a corpus, 0 to 1; several with commas",
    )
    add("--at-step", type=int, metavar="N", help="with --set: apply once N steps are taken")
    add("--skip-steps", metavar="FIRST:PAST", help="skip the samples of these future steps, counted from 1")
    add("--extend", metavar="CORPUS", help="use the parts that were appended to a corpus")
    add("--reason", default="", metavar="TEXT", help="note for the run's state")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="maximum wait; default: %(default)s")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Show the mixture, or send a request and wait for the reply."""
    check_timeout(arguments.timeout)
    opened = open_run(arguments.run)
    request = _request(arguments, list(opened.loader.corpora))
    if request is None:
        view = mixture_view(opened)
        print(json.dumps(view) if arguments.json else "\n".join(table(view)))
        return 0
    check_possible(opened.loader, request)
    return ask(arguments.run, request, timeout_s=arguments.timeout, as_json=arguments.json)


def _request(arguments: argparse.Namespace, corpora: list[str]) -> ControlRequest | None:
    weights = shares(arguments.set, option="--set")
    for name in [*weights, *([arguments.extend] if arguments.extend else [])]:
        if name not in corpora:
            raise UsageError("The run has no such corpus", got=name, fix=nearest(name, corpora))
    asked = [bool(weights), arguments.skip_steps is not None, arguments.extend is not None]
    if sum(asked) > 1:
        raise UsageError("--set, --skip-steps and --extend are separate requests", fix="Give one of them.")
    if not any(asked):
        if arguments.at_step is not None or arguments.reason:
            raise UsageError("--at-step and --reason need a request", fix="Add --set CORPUS=SHARE.")
        return None
    steps = arguments.skip_steps and step_range(arguments.skip_steps, option="--skip-steps")
    return ControlRequest(
        weights=weights or None,
        at_step=arguments.at_step,
        skip_steps=(steps.start, steps.stop) if steps else None,
        extend=arguments.extend,
        reason=arguments.reason,
    )


_SHOWN = 20


def table(view: View) -> Iterator[str]:
    """Yield a view as text lines."""
    state = "a job runs on it" if view["running"] else "no job runs on it"
    since = f"this mixture since step {view['since'] + 1:,}"
    yield f"step {view['step']:,} of {view['steps']:,}, {state}; {since}"
    yield ""
    width = max(6, *(len(name) for name in view["corpora"]))
    yield f"{'corpus':<{width}}  {'asked':>8}  {'served':>8}  {'tokens':>18}  {'epochs':>9}"
    for name, row in view["corpora"].items():
        served = "" if row["share"] is None else f"{row['share']:.4%}"
        counts = f"{row['tokens']:>18,}  {row['epochs']:>9.4f}"
        yield f"{name:<{width}}  {row['weight']:>8.4%}  {served:>8}  {counts}"
    yield ""
    past = [mix for mix in view["mixtures"] if mix["after_step"] <= view["step"]]
    planned = [mix for mix in view["mixtures"] if mix["after_step"] > view["step"]]
    yield from _mixtures("mixtures so far", past, latest=True)
    yield from _mixtures("planned", planned, latest=False)
    for skip in view["skips"]:
        count = plural(skip["stop"] - skip["start"], "sample")
        yield f"left out: {count} from sample {skip['start']:,} on{_because(skip['reason'])}"
    for found in view["answers"]:
        if not found["taken_up"]:
            yield f"request {found['number']}: {printable(found['said'])}"
    for number in view["waiting"]:
        yield f"request {number} is waiting for a job"


def _mixtures(title: str, mixtures: list[View], *, latest: bool) -> Iterator[str]:
    if not mixtures:
        return
    shown = mixtures[-_SHOWN:] if latest else mixtures[:_SHOWN]
    left = len(mixtures) - len(shown)
    yield f"{title}:{f' ({left:,} more: --json)' if left else ''}"
    for mix in shown:
        shares = ", ".join(f"{name} {share:.4g}" for name, share in mix["weights"].items())
        yield f"  from step {mix['after_step'] + 1:,}: {shares}{_because(mix['reason'])}"


def _because(reason: str) -> str:
    return f" ({printable(reason)})" if reason else ""
