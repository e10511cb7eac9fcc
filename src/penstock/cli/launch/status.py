"""`penstock launch status`: what a launched run does."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.cli.launch_work import folder_of
from penstock.launch.engines.engine import ENGINES
from penstock.launch.job_folder import JobFolder, line_of
from penstock.obs.metric_names import METRICS_FILE
from penstock.obs.sinks.jsonl import read_records

EPILOG = """\
Shows the engine's state with its reason, the newest step and checkpoint, and the last transitions.

example:
  penstock launch status runs/first
  penstock launch status runs/first --json

exit codes: 0 shown, 1 the engine does not answer, 2 the run was not launched
"""

_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--json", action="store_true", help="print JSON, with all transitions")


def run(arguments: argparse.Namespace) -> int:
    """Show the state."""
    folder = folder_of(arguments.run)
    job, spec = folder.job(), folder.spec()
    state = ENGINES[job.engine].state(job, folder)
    newest, events, last = folder.newest_step(), folder.events(), _last_record(folder)
    if arguments.json:
        found: dict[str, Any] = {
            "engine": job.engine,
            "job": job.ident,
            "is_live": state.is_live,
            "status": state.status,
            "reason": state.reason,
            "nodes": str(spec.nodes),
            "processes": spec.processes,
            "checkpoint": newest if newest >= 0 else None,
            "step": last.get("step"),
            "loss": last.get("loss"),
            "tokens_per_s": last.get("tokens_per_s"),
            "events": events,
        }
        print(json.dumps(found))
        return 0
    print(f"job {job.ident} of {job.engine}: {state.status}{f', {state.reason}' if state.reason else ''}")
    print(f"nodes {spec.nodes} of {spec.processes} processes, submitted {job.submitted_at}")
    said = (
        f"step {last['step']:,}, loss {last['loss']:.4f}, {last['tokens_per_s']:,.0f} tokens/s"
        if last
        else "no step yet"
    )
    print(f"{said}; {f'newest checkpoint {newest:,}' if newest >= 0 else 'no checkpoint yet'}")
    lines = [line_of(event) for event in events]
    if job.engine == "kubernetes":  # pods that have ended keep their logs until the job is deleted
        from penstock.launch.engines import kubernetes

        lines += kubernetes.events(job)
    for line in lines[-_SHOWN:]:
        print(f"  {line}")
    return 0


def _last_record(folder: JobFolder) -> dict[str, Any]:
    path = folder.run / METRICS_FILE
    records: Iterator[dict[str, Any]] = iter(read_records(path)) if path.is_file() else iter(())
    last: dict[str, Any] = {}
    for record in records:
        if "loss" in record and "tokens_per_s" in record:
            last = record
    return last
