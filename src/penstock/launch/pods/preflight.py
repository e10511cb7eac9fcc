"""Preflight of a run's pods: the doctor in each of them, all together, before the job's first start."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping

from penstock.core import clock, env
from penstock.core.errors import UsageError
from penstock.launch.job_folder import JobFolder
from penstock.launch.preflight import EXCLUDE, EXIT_OUTLIERS, REPORT, REPORT_JSON, command_of, reasons_of
from penstock.launch.spec import RunSpec

SLOW_NODE = "[slow node] "
"""Beginning of a line of a pod's log that names a node to leave out, and why; the operator reads it."""
_REASON_CHARACTERS = 120
"""Kubernetes keeps the last 2,048 of what a pod printed."""
_MEETING_S = 1800.0
"""Seconds that pods wait for each other; then the report has those that did not come."""
_POLL_S = 0.1


def is_examined(spec: RunSpec, folder: JobFolder, *, job: str) -> bool:
    """Return True if this start needs no preflight: none was asked for, or this job has had one.

    Pods of an elastic run come when they come, and are not waited for.
    """
    return spec.doctor == "skip" or spec.nodes.is_elastic or folder.examined_job() == job


def _all_there(spec: RunSpec, folder: JobFolder, *, node: int, job: str) -> bool:
    """Wait in the run's folder for the pods of all nodes: pulling an image takes longer than a doctor waits.

    Returns False if this pod was told to stop, or the others were examined without it.
    """
    meeting = folder.path / f"examined-{job}"
    end = clock.monotonic() + _MEETING_S
    try:
        meeting.mkdir(exist_ok=True)
        (meeting / str(node)).touch()
        while len(list(meeting.iterdir())) < spec.nodes.most and clock.monotonic() < end:
            if signal.SIGTERM in signal.sigpending() or folder.examined_job() == job:
                return False
            clock.sleep(_POLL_S)
    except FileNotFoundError:  # the first pod removes the folder once all were examined
        return False
    return True


def variables_of(spec: RunSpec, *, node: int, host: str, port: int) -> Mapping[str, str]:
    """Return the variables by which the doctors of all pods find each other."""
    return {
        "RANK": str(node),
        "WORLD_SIZE": str(spec.nodes.most),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def examine_pods(spec: RunSpec, folder: JobFolder, *, node: int, host: str, port: int, job: str) -> bool:
    """Examine this pod with all others; return False if it was told to stop meanwhile.

    Args:
        port: of the doctors' store in the first pod.
        job: whose first start this is.

    Raises:
        UsageError: the doctor found something red, and the run is to start on sound nodes only.
    """
    if not _all_there(spec, folder, node=node, job=job):
        return signal.SIGTERM not in signal.sigpending()
    if node == 0:  # of an earlier job
        for name in (EXCLUDE, REPORT_JSON):
            (folder.path / name).unlink(missing_ok=True)
    variables = {**env.variables(""), **variables_of(spec, node=node, host=host, port=port)}
    report = folder.path / REPORT if node == 0 else os.devnull
    with open(report, "wb") as out:  # noqa: PTH123 - also the null device
        process = subprocess.Popen([sys.executable, *command_of(spec)], env=variables, stdout=out)
        while process.poll() is None:
            if signal.SIGTERM in signal.sigpending():
                process.kill()
                process.wait()
                return False
            clock.sleep(_POLL_S)
    if node:
        return True
    code = process.returncode
    folder.log_event("examined", node=node, code=code, report=str(folder.path / REPORT))
    os.write(1, (folder.path / REPORT).read_bytes())
    folder.mark_examined(job)
    shutil.rmtree(folder.path / f"examined-{job}", ignore_errors=True)
    if code and spec.doctor == "require":
        fix = "Mend what the report has in red."
        if code == EXIT_OUTLIERS:  # all of it is of these nodes
            slow = (folder.path / EXCLUDE).read_text().split()
            reasons = reasons_of(json.loads((folder.path / REPORT_JSON).read_text()))
            for name in slow:
                why = reasons.get(name, "")[:_REASON_CHARACTERS]
                os.write(1, f"{SLOW_NODE}{name}: {why}\n".encode())
            fix = f"Leave out {', '.join(slow)} (--exclude-node), or mend what the report has in red."
        raise UsageError(
            f"The doctor ended with {code}, and the run asks for sound nodes (--doctor require)",
            got=str(folder.path / REPORT),
            fix=fix,
        )
    return True
