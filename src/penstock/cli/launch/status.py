"""`penstock launch status`: what a launched run does."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from penstock.cli.options import OutputOptions, RunOptions, add_fields, options_of
from penstock.core.units import plural
from penstock.launch.engines.engine import ENGINES
from penstock.launch.job_folder import JobFolder, line_of

EPILOG = """\
Shows the engine's state with its reason, the newest step and checkpoint, and the last transitions.

example:
  penstock launch status runs/first
  penstock launch status runs/first --json

exit codes: 0 shown, 1 the job waits until somebody does what the reason says, or the engine does not answer,
2 the run was not launched
"""

_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fields(parser, RunOptions)
    add_fields(parser, OutputOptions, more={"json": ", with all transitions"})


def run(arguments: argparse.Namespace) -> int:
    """Show the state."""
    as_json = options_of(arguments, OutputOptions).json
    folder = JobFolder(options_of(arguments, RunOptions).run.absolute())
    if folder.is_held() and not folder.has_job():
        print(json.dumps({"status": "STARTING", "is_live": True}) if as_json else "the job is starting")
        return 0
    job, spec = folder.job(), folder.spec()
    state = ENGINES[job.engine].state(job, folder)
    events, progress = folder.events(), folder.progress()
    if job.engine == "kubernetes":  # the run's folder is in a volume: the first pod prints what is in it
        from penstock.launch.engines.kubernetes_logs import read_printed_run

        printed = read_printed_run(job)
        events += [event for event in printed.events if event not in events]
        events.sort(key=lambda event: str(event.get("time")))
        progress = {name: printed.progress.get(name) for name in progress}
        said = _said(progress) if printed.progress else "no pod has printed yet how far the run is"
    else:
        said = _said(progress)
    if as_json:
        found: dict[str, Any] = {
            "engine": job.engine,
            "job": job.ident,
            "is_live": state.is_live,
            "status": state.status,
            "reason": state.reason,
            "is_stuck": state.is_stuck,
            "nodes": str(spec.nodes),
            "processes": spec.processes,
            **progress,
            "events": events,
        }
        print(json.dumps(found))
        return int(state.is_stuck)
    print(f"job {job.ident} of {job.engine}: {state.status}{f', {state.reason}' if state.reason else ''}")
    print(f"nodes {spec.nodes} of {plural(spec.processes, 'process')}, submitted {job.submitted_at}")
    print(said)
    for event in events[-_SHOWN:]:
        print(f"  {line_of(event)}")
    return int(state.is_stuck)


def _said(progress: Mapping[str, Any]) -> str:
    step, loss, rate, checkpoint = (progress[name] for name in ("step", "loss", "tokens_per_s", "checkpoint"))
    is_trained = step is not None and loss is not None and rate is not None
    now = f"step {step:,}, loss {loss:.4f}, {rate:,.0f} tokens/s" if is_trained else "no step yet"
    return f"{now}; {'no checkpoint yet' if checkpoint is None else f'newest checkpoint {checkpoint:,}'}"
