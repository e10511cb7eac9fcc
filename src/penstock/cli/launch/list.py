"""`penstock launch list`: the jobs of this user."""

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path

from penstock.core.errors import UsageError
from penstock.launch.job_folder import LAUNCH_FOLDER
from penstock.launch.job_list import UNKNOWN, ListedJob, list_jobs
from penstock.launch.known_runs import known_runs

EPILOG = """\
Lists the runs that you have launched from this machine, those below FOLDER, and all of your jobs in Slurm's
queue. A run that its engine no longer lists has ended.

example:
  penstock launch list
  penstock launch list /shared/runs --live
  penstock launch list --namespace research --json

exit codes: 0 listed, 1 an engine did not answer, so some states are UNKNOWN, 2 wrong usage
"""

_DEEPEST = 5
"""Folders between a given one and a run."""
_COLUMNS = ("run", "engine", "job", "status", "nodes", "step", "submitted", "reason")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("folders", type=Path, nargs="*", metavar="FOLDER", help="folder in which runs are searched, too")
    add("--live", action="store_true", help="only jobs that run or wait")
    add("--namespace", default="", metavar="NAME", help="also all jobs of Penstock in this namespace")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """List the jobs."""
    if missing := next((folder for folder in arguments.folders if not folder.is_dir()), None):
        raise UsageError("There is no such folder to search for runs", got=str(missing))
    places = [("slurm", "")] if shutil.which("squeue") else []
    if arguments.namespace:
        places.append(("kubernetes", f"/{arguments.namespace}"))
    searched = [
        path.parent.parent
        for folder in arguments.folders
        for depth in range(_DEEPEST + 1)
        for path in folder.absolute().glob(f"{'*/' * depth}{LAUNCH_FOLDER}/job.json")
    ]
    jobs = list_jobs([*known_runs(), *searched], places)
    shown = [job for job in jobs if job.is_live or job.status == UNKNOWN or not arguments.live]
    if arguments.json:
        print(json.dumps([asdict(job) for job in shown], indent=1))
    else:
        print("\n".join(_table(shown)) if shown else "no jobs: `penstock launch local RECIPE` starts one")
    return int(any(job.status == UNKNOWN for job in shown))


def _table(jobs: list[ListedJob]) -> list[str]:
    """Return lines of aligned columns."""
    rows = [_COLUMNS, *map(_cells, jobs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _cells(job: ListedJob) -> tuple[str, ...]:
    step = "-" if job.step is None else f"{job.step:,}"
    words = (job.run, job.engine, job.job, job.status, job.nodes, step, job.submitted_at, job.reason)
    return tuple(" ".join(word.split()) or "-" for word in words)
