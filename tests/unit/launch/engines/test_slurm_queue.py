"""What Slurm's partitions can give, and what its reasons mean; the lines are those of Slurm 22.05."""

import pytest

from penstock.core.errors import UsageError
from penstock.launch.engines.slurm_queue import (
    WAIT_REASONS,
    asked_of,
    check_partitions,
    check_preemption,
    limit_of,
    partitions_of,
    preemption_note,
    wait_reason,
)
from penstock.launch.spec import node_range
from tests.unit.launch.test_spec import make_spec

LINE = (
    "PartitionName={name} AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default={default} "
    "QoS=N/A DefaultTime={default_time} DisableRootJobs=NO ExclusiveUser=NO GraceTime={grace} Hidden=NO "
    "MaxNodes={most} MaxTime={limit} MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=n[0-3] "
    "PriorityJobFactor=1 PriorityTier={tier} RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE "
    "PreemptMode={mode} State={state} TotalCPUs=4 TotalNodes=4 SelectTypeParameters=NONE JobDefaults=(null) "
    "DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=4,mem=4000M,node=4,billing=4"
)


def line(name, **changes):
    values = {"default": "NO", "default_time": "NONE", "grace": 0, "most": "UNLIMITED", "limit": "UNLIMITED"}
    return LINE.format(name=name, **{**values, "tier": 1, "mode": "REQUEUE", "state": "UP", **changes})


SHOWN = "\n".join(
    [
        line("low", default="YES", grace=40, limit="01:00:00"),
        line("high", tier=10, mode="OFF"),
        line("small", most=2, default_time="00:30:00"),
        line("closed", state="DOWN"),
        line("first", tier=10),
    ]
)
CONFIG = "KillWait                = 30 sec\nPreemptType             = preempt/partition_prio\n"
PARTITIONS = partitions_of(SHOWN, CONFIG)


def asked(spec):
    return asked_of(spec, PARTITIONS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"queue": "closed"}, r"Partition closed starts no job now \(got 'DOWN'\)"),
        ({"queue": "small", "nodes": node_range("3")}, "Partition small gives a job at most 2 nodes"),
        ({"queue": "high", "nodes": node_range("5")}, "Partition high has 4 nodes"),
        ({"nodes": node_range("5")}, "Partition low has 4 nodes"),
        ({"time_limit_s": 7200.0}, r"Partition low ends jobs after 1h00m \(got '--time-limit 2h00m'\)"),
        ({"queue": "hgih"}, "Slurm has no such partition .* Did you mean 'high'"),
        ({"queue": "closed,small", "nodes": node_range("3")}, "Partition closed starts no job now"),
    ],
)
def test_what_a_partition_never_starts_is_refused(changes, said):
    spec = make_spec(**changes)
    with pytest.raises(UsageError, match=said):
        check_partitions(spec, asked(spec))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"queue": "small", "nodes": node_range("2:4")},
        {"queue": "closed,high"},
        {"time_limit_s": 3600.0},
    ],
)
def test_what_one_of_the_partitions_can_start_is_not(changes):
    spec = make_spec(**changes)
    check_partitions(spec, asked(spec))


def test_without_a_default_partition_nothing_is_checked():
    spec = make_spec(nodes=node_range("9"))
    check_partitions(spec, asked_of(spec, []))


def test_partitions_do_not_tell_of_a_pre_emption_by_qos():
    by_qos = partitions_of(SHOWN, CONFIG.replace("partition_prio", "qos"))
    check_preemption(by_qos, step_s=1.0, save_s=1000.0)


@pytest.mark.parametrize(
    ("queue", "left_s"), [("", 70.0), ("small", 30.0), ("high", 0.0), ("first", 0.0), ("small,low", 30.0)]
)
def test_a_save_that_takes_longer_than_a_pre_emption_leaves_is_refused(queue, left_s):
    partitions = asked(make_spec(queue=queue))
    assert partitions[0].preempted_within_s == left_s
    check_preemption(partitions, step_s=1.0, save_s=left_s - 6.5)
    if left_s and "," not in queue:
        said = f"leaves a job that it pre-empts too little time for a step .*got .{left_s:g} s, GraceTime"
        with pytest.raises(UsageError, match=said):
            check_preemption(partitions, step_s=1.0, save_s=left_s - 5.5)


def test_a_dry_run_says_what_a_pre_emption_leaves():
    low, high = asked(make_spec(queue="low")), asked(make_spec(queue="high"))
    assert "leaves 70 s in partition low (GraceTime and KillWait): no save is measured" in preemption_note(
        low, step_s=0.0, save_s=0.0
    )
    assert "a step of 1.0 s and a save of 20.0 s need 26 s" in preemption_note(low, step_s=1.0, save_s=20.0)
    two = preemption_note(asked(make_spec(queue="small,low")), step_s=1.0, save_s=50.0)
    assert "30 s in partition small, too short, 70 s in partition low (" in two
    assert preemption_note(low, step_s=1.0, save_s=70.0).startswith("a submit would be refused: ")
    assert preemption_note(high, step_s=1.0, save_s=70.0) == ""


@pytest.mark.parametrize(
    ("queue", "limit_s"), [("", 3600.0), ("small", 1800.0), ("small,low", 3600.0), ("high,low", 0.0)]
)
def test_the_time_limit_of_a_job_that_asks_for_none_is_the_partitions(queue, limit_s):
    assert limit_of(asked(make_spec(queue=queue))) == limit_s


@pytest.mark.parametrize(
    ("word", "is_stuck"),
    [
        ("Resources", False),
        ("AssocMaxJobsLimit", False),
        ("ReqNodeNotAvail", False),
        ("ReqNodeNotAvail, UnavailableNodes:", False),
        ("ReqNodeNotAvail, Reserved for maintenance", False),
        ("ReqNodeNotAvail, UnavailableNodes:n[0-1]", True),
        ("Dependency", False),
        ("DependencyNeverSatisfied", True),
        ("PartitionConfig", True),
        ("PartitionDown", True),
        ("JobHeldUser", True),
        ("launch_failed_requeued_held", True),
    ],
)
def test_reasons_that_no_time_ends_have_a_remedy(word, is_stuck):
    found = wait_reason(word)
    assert found is not None
    assert bool(found.remedy) == is_stuck


def test_a_reason_that_is_not_known_is_taken_for_one_that_ends():
    assert wait_reason("NewInSlurm99") is None


@pytest.mark.parametrize("name", WAIT_REASONS)
def test_each_remedy_names_nothing_but_the_job(name):
    WAIT_REASONS[name].remedy.format(job="7")
