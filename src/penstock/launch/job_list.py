"""Jobs of a user: of the run folders that are known, joined with what the engines list."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.core.errors import PenstockError
from penstock.launch.engines.engine import ENGINES, JobState
from penstock.launch.job_folder import Job, JobFolder

UNKNOWN = "UNKNOWN"
"""Status of a job whose engine does not answer, or whose files cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedJob:
    """A job, and how far its run is."""

    run: str
    """Folder of its run; empty: the engine has it, and no folder here is known."""
    engine: str
    job: str
    status: str
    is_live: bool = False
    reason: str = ""
    nodes: str = ""
    step: int | None = None
    """Newest step; None: none, or the run's folder is in a volume of the cluster."""
    submitted_at: str = ""


def list_jobs(runs: Iterable[Path], places: Sequence[tuple[str, str]] = ()) -> list[ListedJob]:
    """Return the jobs of run folders and of engines: those that live first, of these the newest first.

    Each engine is asked once for all of its jobs, and Slurm once more for known jobs that are not among this
    user's: they may be a colleague's. A job that is then not listed has ended.

    Args:
        runs: folders; those without a job are left out.
        places: engine and host that are asked for jobs of other folders, too.
    """
    found: list[ListedJob] = []
    submitted: dict[tuple[str, str], list[tuple[Job, ListedJob, JobFolder]]] = {place: [] for place in places}
    for folder in map(JobFolder, {run.resolve(): run for run in reversed([*runs])}.values()):
        try:
            if not folder.has_job():
                continue
            job, spec = folder.job(), folder.spec()
        except (PenstockError, OSError) as error:
            said = str(error).partition(". ")[0]
            found.append(ListedJob(run=str(folder.run), engine="", job="", status=UNKNOWN, reason=said))
            continue
        step = folder.last_record().get("step")
        row = ListedJob(
            run=str(folder.run),
            engine=job.engine,
            job=job.ident,
            status="ENDED",
            nodes=str(spec.nodes),
            step=step if type(step) is int else None,
            submitted_at=job.submitted_at,
        )
        place = (job.engine, job.host if job.engine == "kubernetes" else "")
        submitted.setdefault(place, []).append((job, row, folder))
    for place, rows in submitted.items():
        found += _at(*place, rows, asks_for_others=place in places)
    known = {(row.engine, row.job) for row in found if row.run}
    # A cluster may be known by two names.
    found = [row for row in found if row.run or (row.engine, row.job) not in known]
    newest_first = sorted(found, key=lambda row: row.submitted_at, reverse=True)
    return sorted(newest_first, key=lambda row: not row.is_live)


def _at(
    engine: str, host: str, rows: Sequence[tuple[Job, ListedJob, JobFolder]], *, asks_for_others: bool
) -> Iterable[ListedJob]:
    """Yield the jobs that were submitted to an engine at one place, and others that it lists."""
    try:
        queued = dict(ENGINES[engine].jobs(host, [job.ident for job, _, _ in rows]))
    except PenstockError as error:
        said = str(error).partition(". ")[0]
        for _, row, _ in rows:
            yield replace(row, status=UNKNOWN, reason=said)
        if not rows and host:  # a Slurm without known jobs may be no more than its commands
            yield ListedJob(run="", engine=engine, job="", status=UNKNOWN, reason=said)
        return
    for job, row, folder in rows:
        if engine == "local":
            state = ENGINES[engine].state(job, folder)
        elif (known := queued.pop(job.ident, None)) is not None:
            state = known.state
        else:
            state = JobState(is_live=False, status="ENDED", reason=str((folder.end() or {}).get("cause", "")))
        yield _with(row, state)
    for ident, there in queued.items() if asks_for_others else ():
        yield _with(ListedJob(run=there.run, engine=engine, job=ident, status=""), there.state)


def _with(row: ListedJob, state: JobState) -> ListedJob:
    return replace(row, status=state.status, is_live=state.is_live, reason=state.reason)
