"""Ownership of a cluster's job by a run: names alone do not tell.

A JobSet or TrainJob of the run's name that the run does not own is another's: it is neither stopped nor taken
over. Kubeflow Trainer makes a JobSet of the TrainJob's name, which the TrainJob owns: there the TrainJob is
the job.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Object = Mapping[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFound:
    """Job of a run, or what stands in its way."""

    job: Object | None = None
    is_leaving: bool = False
    """True if it is being deleted."""
    clash: str = ""
    """Why a job of this name cannot be the run's; empty: none is in the way."""


def is_owned(found: Object, uid: str) -> bool:
    """Return True if an object has an owner of this uid.

    >>> is_owned({"metadata": {"ownerReferences": [{"uid": "7"}]}}, "7"), is_owned({"metadata": {}}, "7")
    (True, False)
    """
    return any(owner["uid"] == uid for owner in found["metadata"].get("ownerReferences") or [])


def job_of(uid: str, jobset: Object | None, trainjob: Object | None) -> JobFound:
    """Return the job of a run from the objects of its name.

    Args:
        uid: of the run.
        jobset: the JobSet of the run's name; None: there is none.
        trainjob: the TrainJob of the run's name; None: there is none.
    """
    for found in (trainjob, jobset):
        if found is not None and is_owned(found, uid):
            return JobFound(job=found, is_leaving="deletionTimestamp" in found["metadata"])
    if trainjob is not None:
        return JobFound(clash=clash_of(trainjob))
    if jobset is None:
        return JobFound()
    owners = jobset["metadata"].get("ownerReferences") or []
    if any(owner["kind"] == "TrainJob" and owner.get("controller") for owner in owners):
        return JobFound(job=jobset, is_leaving=True)  # its TrainJob is gone: the garbage collector takes it
    return JobFound(clash=clash_of(jobset))


def clash_of(found: Object) -> str:
    """Return what to say of an object that another one made."""
    what, name = found["kind"], found["metadata"]["name"]
    return (
        f"{what} {name} exists and is not this run's, so it is left alone. "
        "Delete it, or give the run another name."
    )
