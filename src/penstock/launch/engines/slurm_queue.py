"""Slurm's queue: what a partition gives a job, what a pre-emption leaves it, and why a job waits.

Pure: from what `scontrol` and `squeue` print.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.core.errors import UsageError, nearest
from penstock.core.units import duration, plural
from penstock.launch.spec import RunSpec, needed_grace

_UNLIMITED = 0
_KILLING_MODES = ("REQUEUE", "CANCEL")
_MIN_KILL_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Partition of a cluster."""

    name: str
    is_default: bool = False
    state: str = "UP"
    """Slurm's word: UP, DOWN, DRAIN or INACTIVE."""
    num_nodes: int
    most_nodes: int = _UNLIMITED
    """Nodes of a job at most; 0: no limit."""
    limit_s: float = 0.0
    """Longest time limit of a job; 0: none."""
    default_limit_s: float = 0.0
    """Time limit of a job that asks for none; 0: none."""
    preempted_within_s: float = 0.0
    """Seconds from the signal of a pre-emption to the kill; 0: its jobs are not pre-empted."""


def partitions_of(shown: str, config: str) -> list[Partition]:
    """Read partitions from `scontrol --oneliner show partition` and `scontrol show config`.

    Where Slurm pre-empts by partitions, a job is pre-empted if its partition allows that and another one has
    a higher tier. It then has GraceTime until it is told a second time, and KillWait from there. Where it
    pre-empts by QOS, partitions do not tell.

    >>> line = "PartitionName=a Default=YES TotalNodes=4 MaxNodes=2 MaxTime=01:00:00 DefaultTime=NONE"
    >>> (found,) = partitions_of(line, "KillWait = 30 sec")
    >>> found.is_default, found.num_nodes, found.most_nodes, found.limit_s, found.default_limit_s
    (True, 4, 2, 3600.0, 3600.0)
    """
    rows = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in shown.splitlines()]
    rows = [row for row in rows if "PartitionName" in row]
    by_partition = _setting("PreemptType", config).endswith("partition_prio")
    kill_wait_s = max(_number(_setting("KillWait", config)), _MIN_KILL_WAIT_S)
    top = max((_number(row.get("PriorityTier", "")) for row in rows), default=0)
    found = []
    for row in rows:
        is_preempted = by_partition and row.get("PreemptMode", "").startswith(_KILLING_MODES)
        is_preempted = is_preempted and _number(row.get("PriorityTier", "")) < top
        left_s = _number(row.get("GraceTime", "")) + kill_wait_s
        limit_s = seconds_of(row.get("MaxTime", ""))
        found.append(
            Partition(
                name=row["PartitionName"],
                is_default=row.get("Default") == "YES",
                state=row.get("State", "UP"),
                num_nodes=_number(row.get("TotalNodes", "")),
                most_nodes=_number(row.get("MaxNodes", "")),
                limit_s=limit_s,
                default_limit_s=seconds_of(row.get("DefaultTime", "")) or limit_s,
                preempted_within_s=left_s if is_preempted else 0.0,
            )
        )
    return found


def _setting(name: str, config: str) -> str:
    found = re.search(rf"^{name}\s*=\s*(\S+)", config, re.MULTILINE)
    return found[1] if found else ""


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else _UNLIMITED


def seconds_of(text: str) -> float:
    """Return the seconds of a time limit in Slurm's form; 0: none.

    >>> seconds_of("1-00:00:10"), seconds_of("30:00"), seconds_of("UNLIMITED")
    (86410.0, 1800.0, 0.0)
    """
    days, _, rest = text.strip().rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in parts) or (days and not days.isdecimal()):
        return 0.0
    total = 0.0
    for part in parts:
        total = 60 * total + int(part)
    if len(parts) == 1:
        total *= 60
    return total + 86400 * int(days or 0)


def asked_of(spec: RunSpec, partitions: Sequence[Partition]) -> list[Partition]:
    """Return the partitions that a run asks for: any of those it names, else the default one.

    Raises:
        UsageError: there is none of that name.
    """
    by_name = {partition.name: partition for partition in partitions}
    names = [name for name in spec.queue.split(",") if name]
    for name in names:
        if name not in by_name:
            raise UsageError("Slurm has no such partition", got=name, fix=nearest(name, list(by_name)))
    return [by_name[name] for name in names] or [each for each in partitions if each.is_default]


def check_partitions(spec: RunSpec, asked: Sequence[Partition]) -> None:
    """Refuse a run that none of the partitions it asks for can start.

    Raises:
        UsageError: what is wrong with the first.
    """
    _one_of(asked, lambda partition: _check_partition(spec, partition))


def limit_of(asked: Sequence[Partition]) -> float:
    """Return the seconds after which a job that asks for no time limit is ended; 0: not known, or never."""
    limits = [partition.default_limit_s for partition in asked]
    return max(limits, default=0.0) if all(limits) else 0.0


def check_preemption(asked: Sequence[Partition], *, step_s: float, save_s: float) -> None:
    """Refuse a run that could not save when it is pre-empted, in none of the partitions it asks for.

    Args:
        step_s: longest measured step.
        save_s: longest measured save.

    Raises:
        UsageError: what is wrong with the first.
    """
    needed, parts = needed_grace(step_s=step_s, save_s=save_s)

    def check(partition: Partition) -> None:
        if 0 < partition.preempted_within_s < needed:
            raise UsageError(
                f"Partition {partition.name} leaves a job that it pre-empts too little time for {parts}",
                got=f"{partition.preempted_within_s:g} s, GraceTime and KillWait",
                fix="Ask for a --partition whose jobs are not pre-empted, or that leaves them longer.",
            )

    _one_of(asked, check)


def preemption_note(asked: Sequence[Partition], *, step_s: float, save_s: float) -> str:
    """Return how long a pre-empted run has to save, as text; empty: it is not pre-empted."""
    left = {each.name: each.preempted_within_s for each in asked if each.preempted_within_s}
    if not left:
        return ""
    try:
        check_preemption(asked, step_s=step_s, save_s=save_s)
    except UsageError as error:
        return f"a submit would be refused: {error}"
    needed, _ = needed_grace(step_s=step_s, save_s=save_s)
    times = ", ".join(
        f"{seconds:g} s in partition {name}{', too short' if seconds < needed else ''}"
        for name, seconds in left.items()
    )
    measured = "no save is measured yet"
    if save_s:
        measured = f"a step of {step_s:.1f} s and a save of {save_s:.1f} s need {needed:.0f} s"
    return f"pre-emption leaves {times} (GraceTime and KillWait): {measured}"


def _one_of(asked: Sequence[Partition], check: Callable[[Partition], None]) -> None:
    """Let one of the partitions pass a check, if there are any."""
    errors = []
    for partition in asked:
        try:
            check(partition)
        except UsageError as error:
            errors.append(error)
    if errors and len(errors) == len(asked):
        raise errors[0]


def _check_partition(spec: RunSpec, partition: Partition) -> None:
    name, least = partition.name, spec.nodes.least
    if partition.state != "UP":
        raise UsageError(
            f"Partition {name} starts no job now",
            got=partition.state,
            fix="Ask for another --partition, or wait until it is up: sinfo.",
        )
    if least > partition.num_nodes:
        raise UsageError(
            f"Partition {name} has {plural(partition.num_nodes, 'node')}, so the job would wait for ever",
            got=f"--nodes {spec.nodes}",
            fix=f"Ask for at most {partition.num_nodes}, or for another --partition.",
        )
    if partition.most_nodes and least > partition.most_nodes:
        raise UsageError(
            f"Partition {name} gives a job at most {plural(partition.most_nodes, 'node')}",
            got=f"--nodes {spec.nodes}",
            fix=f"Ask for at most {partition.most_nodes}, or for another --partition.",
        )
    if partition.limit_s and spec.time_limit_s > partition.limit_s:
        raise UsageError(
            f"Partition {name} ends jobs after {duration(partition.limit_s)}",
            got=f"--time-limit {duration(spec.time_limit_s)}",
            fix="Ask for less: the job puts itself back into the queue at its time limit.",
        )


class WaitReason(NamedTuple):
    """Why a job waits."""

    meaning: str
    remedy: str = ""
    """What ends the wait, with the job's id as {job}; empty: time does."""


_SMALLER = "give it fewer nodes (penstock launch resize), or cancel it and launch it on another --partition"
_SHORTER = "cancel it, and launch it with a shorter --time-limit or on another --partition"
_ELSEWHERE = "cancel it and launch it on another --partition, or ask an administrator"
_OPTIONS = "cancel it, and launch it with other options"
_RELEASE = "scontrol release {job}"

WAIT_REASONS: Mapping[str, WaitReason] = {
    "Resources": WaitReason("it waits for nodes to become free"),
    "Priority": WaitReason("jobs of higher priority come first"),
    "BeginTime": WaitReason("its time has not come: a requeued job waits a while"),
    "Dependency": WaitReason("it waits for another job"),
    "Reservation": WaitReason("it waits for its reservation"),
    "Licenses": WaitReason("it waits for a license"),
    "AssocGrpNodeLimit": WaitReason("your account has reached its number of nodes"),
    "AssocMaxJobsLimit": WaitReason("you have reached your account's number of jobs"),
    "QOSMaxJobsPerUserLimit": WaitReason("you have reached your number of jobs"),
    "ReqNodeNotAvail": WaitReason("nodes it needs are in use or reserved"),
    "ReqNodeNotAvail, UnavailableNodes:": WaitReason("nodes it needs are down or drained", _ELSEWHERE),
    "NodeDown": WaitReason("a node it needs is down", _ELSEWHERE),
    "PartitionDown": WaitReason("the partition is down", _ELSEWHERE),
    "PartitionInactive": WaitReason("the partition is inactive", _ELSEWHERE),
    "PartitionConfig": WaitReason("the partition never gives a job what it asks for", _SMALLER),
    "PartitionNodeLimit": WaitReason("the partition never gives so many nodes to a job", _SMALLER),
    "AssocMaxNodePerJobLimit": WaitReason("your account never gives so many nodes to a job", _SMALLER),
    "QOSMaxNodePerJobLimit": WaitReason("its QOS never gives so many nodes to a job", _SMALLER),
    "PartitionTimeLimit": WaitReason("its time limit is longer than the partition allows", _SHORTER),
    "AssocMaxWallDurationPerJobLimit": WaitReason(
        "its time limit is longer than your account allows", _SHORTER
    ),
    "QOSMaxWallDurationPerJobLimit": WaitReason("its time limit is longer than its QOS allows", _SHORTER),
    "BadConstraints": WaitReason("no node has what it asks for", _OPTIONS),
    "DependencyNeverSatisfied": WaitReason("the job it waits for ended otherwise", _OPTIONS),
    "ReservationDeleted": WaitReason("its reservation is gone", _OPTIONS),
    "InvalidAccount": WaitReason("its account is not valid", _OPTIONS),
    "AccountNotAllowed": WaitReason("the partition does not take its account", _OPTIONS),
    "InvalidQOS": WaitReason("its QOS is not valid", _OPTIONS),
    "QOSNotAllowed": WaitReason("the partition does not take its QOS", _OPTIONS),
    "JobHeldUser": WaitReason("it is held", _RELEASE),
    "JobHeldAdmin": WaitReason("an administrator holds it", "ask them to release it"),
    "JobHoldMaxRequeue": WaitReason("Slurm has requeued it too often", _RELEASE),
    "launch failed requeued held": WaitReason("a node could not start it", _RELEASE),
}
"""By the beginning of Slurm's word; the longest counts."""


def wait_reason(word: str) -> WaitReason | None:
    """Return what a reason of Slurm's means; None: it is not known here.

    >>> wait_reason("ReqNodeNotAvail, UnavailableNodes:n[1-2]").meaning
    'nodes it needs are down or drained'
    >>> wait_reason("ReqNodeNotAvail, UnavailableNodes:").meaning
    'nodes it needs are in use or reserved'
    """
    word = word.replace("_", " ").removesuffix(", UnavailableNodes:")
    known = [name for name in WAIT_REASONS if word.startswith(name)]
    return WAIT_REASONS[max(known, key=len)] if known else None
