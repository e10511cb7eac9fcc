"""Send a request to a run's job, unless no start of the run could apply it; no torch."""

from pathlib import Path

from penstock.core.errors import UsageError, nearest
from penstock.launch.engines.engine import stop_between_starts
from penstock.launch.job_folder import JobFolder
from penstock.train.control.apply_request import check_possible
from penstock.train.control.requests import ControlRequest, job_is_running, submit
from penstock.train.inspect.open_run import recipe_of
from penstock.train.inspect.recent_run import opened_run


class NoJob(UsageError):
    """The request concerns a running job, and there is none."""


def send(run: Path, request: ControlRequest) -> int | str:
    """Send a request; return its number, or what was done instead: a launched run may be between two starts.

    Raises:
        NoJob: the request needs a running job.
        UsageError: the folder is not a run, or it has no such corpus.
        PenstockError: the request is not possible, or a corpus cannot be opened.
    """
    if request.stop and not job_is_running(run):
        said = stop_between_starts(JobFolder(run))
        if said and not job_is_running(run):  # else it trains by now, and may have missed the mark
            return said
    if request.weights or request.skip_steps or request.extend:
        loader = opened_run(run).loader
        for name in request.weights or ([request.extend] if request.extend else []):
            if name not in loader.corpora:
                raise UsageError("The run has no such corpus", got=name, fix=nearest(name, [*loader.corpora]))
        check_possible(loader, request)
    else:
        recipe_of(run)  # raises for an invalid folder; the corpora may be out of sight
    if (request.needs_job or request.islands) and not job_is_running(run):
        fix = "A run that was stopped has its checkpoints."
        if request.islands:
            fix = "Start it with --processes for as many islands as you want."
        raise NoJob(f"No job runs on {run.name}", fix=fix)
    return submit(run, request)
