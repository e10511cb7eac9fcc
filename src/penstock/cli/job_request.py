"""Send a control request to a running job, wait for the reply, and print it."""

import getpass
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

from penstock.core import clock
from penstock.core.errors import UsageError
from penstock.core.units import duration
from penstock.train.control.requests import ControlReply, ControlRequest, job_is_running, read_answer, submit

_LOOK_EVERY_S = 0.05


def check_timeout(timeout_s: float) -> None:
    """Raise for an invalid timeout.

    Raises:
        UsageError: the timeout is negative.
    """
    if not timeout_s >= 0:
        raise UsageError("--timeout must be zero seconds or more", got=timeout_s)


def ask(run: Path, request: ControlRequest, *, timeout_s: float, as_json: bool) -> int:
    """Send a request in the user's name, and wait for the reply while a job runs; return an exit code."""
    number = submit(run, replace(request, asked_by=_user()))
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


def _user() -> str:
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
