"""What the operator does about a run, from what the cluster shows."""

import dataclasses

import pytest

from penstock.launch.controller.decide import (
    EXCLUDE_AT_MOST,
    FIT_S,
    STUCK_S,
    JobSeen,
    PodSeen,
    RunAction,
    RunPhase,
    RunSeen,
    decide,
)

JOB = JobSeen(digest="a", nodes="2")
LEAVING = JobSeen(digest="a", nodes="2", is_leaving=True)
RUNNING = [PodSeen(name=f"p{i}", index=i, node=f"n{i}", phase="Running", running_s=FIT_S) for i in range(3)]


def seen(**values):
    return RunSeen(**{"digest": "a", "nodes": "2", "job": JOB, "pods": RUNNING[:2], **values})


@pytest.mark.parametrize(
    ("run", "act", "phase"),
    [
        (seen(), RunAction.NOTHING, RunPhase.RUNNING),
        (seen(pods=[]), RunAction.NOTHING, RunPhase.PENDING),
        (seen(job=None, pods=[]), RunAction.APPLY, RunPhase.PENDING),
        (
            seen(job=None),
            RunAction.NOTHING,
            RunPhase.STOPPING,
        ),  # pods of before still write to the run's folder
        (seen(job=LEAVING, pods=[]), RunAction.NOTHING, RunPhase.STOPPING),
        (seen(digest="b"), RunAction.STOP, RunPhase.STOPPING),
        (seen(digest="b", job=LEAVING), RunAction.NOTHING, RunPhase.STOPPING),
        (seen(is_suspended=True), RunAction.STOP, RunPhase.STOPPING),
        (seen(is_suspended=True, job=None), RunAction.NOTHING, RunPhase.STOPPING),
        (seen(is_suspended=True, job=None, pods=[]), RunAction.NOTHING, RunPhase.SUSPENDED),
        (seen(is_deleted=True), RunAction.STOP, RunPhase.STOPPING),
        (seen(is_deleted=True, job=LEAVING), RunAction.NOTHING, RunPhase.STOPPING),
        (seen(is_deleted=True, job=None, pods=[]), RunAction.RELEASE, RunPhase.STOPPING),
        (seen(digest="", invalid="no"), RunAction.NOTHING, RunPhase.RUNNING),
        (seen(digest="", invalid="no", is_suspended=True), RunAction.STOP, RunPhase.STOPPING),
        (
            seen(digest="", invalid="no", is_suspended=True, job=None, pods=[]),
            RunAction.NOTHING,
            RunPhase.SUSPENDED,
        ),
        (seen(digest="", invalid="no", job=None, pods=[]), RunAction.NOTHING, RunPhase.INVALID),
        (seen(job=JobSeen(digest="a", end="COMPLETED")), RunAction.NOTHING, RunPhase.SUCCEEDED),
        (seen(job=JobSeen(digest="a", end="FAILED")), RunAction.NOTHING, RunPhase.FAILED),
        (seen(digest="b", job=JobSeen(digest="a", end="FAILED")), RunAction.STOP, RunPhase.STOPPING),
    ],
)
def test_each_state_of_the_cluster_has_its_next_action(run, act, phase):
    found = decide(run)
    assert (found.act, found.phase) == (act, phase)


def unfit(node, index=2):
    return PodSeen(name="bad", index=index, node=node, phase="Failed", unfit="no folder")


def test_a_node_is_excluded_where_another_one_is_fit():
    found = decide(seen(pods=[*RUNNING[:1], unfit("n9")]))
    assert (found.act, found.targets, found.cause) == (RunAction.EXCLUDE, ("n9",), "node n9: no folder")


def test_a_node_whose_fault_has_passed_is_not_excluded():
    assert decide(seen(pods=[unfit("n0"), *RUNNING])).act is RunAction.NOTHING


def test_a_fault_of_every_node_excludes_none():
    assert decide(seen(pods=[unfit("n8", 0), unfit("n9", 1)])).act is RunAction.NOTHING


def test_a_node_is_fit_once_its_preflight_is_over():
    starting = dataclasses.replace(RUNNING[0], running_s=FIT_S - 1)
    assert decide(seen(pods=[starting, unfit("n9")])).act is RunAction.NOTHING
    assert decide(seen(pods=[starting, RUNNING[1], unfit("n0")])).act is RunAction.NOTHING, "it tries again"


def test_an_excluded_node_is_not_excluded_again():
    assert decide(seen(pods=[*RUNNING[:1], unfit("n9")], excluded=("n9",))).act is RunAction.NOTHING


def test_exclusions_are_bounded():
    excluded = tuple(f"x{i}" for i in range(EXCLUDE_AT_MOST))
    found = decide(seen(pods=[*RUNNING[:1], unfit("n9")], excluded=excluded))
    assert found.act is RunAction.NOTHING
    assert "n9 fails, too: no folder" in found.cause


def preflight(*slow, end="FAILED", **values):
    """A run that pod 0's preflight has ended, which names nodes."""
    named = dict.fromkeys(slow, "eth0 is slow")
    pods = [PodSeen(name="p0", index=0, node="n0", phase="Failed", slow_nodes=named)]
    return seen(job=JobSeen(digest="a", nodes="3", end=end, reason="PodFailurePolicy"), pods=pods, **values)


def test_a_failed_preflight_excludes_all_nodes_that_it_names_and_the_run_starts_without_them():
    found = decide(preflight("n2", "n1"))
    assert (found.act, found.targets) == (RunAction.EXCLUDE, ("n1", "n2"))
    assert found.cause == "the preflight found 2 nodes to leave out: n1 (eth0 is slow), n2 (eth0 is slow)"
    after = preflight("n2", "n1", excluded=("n1", "n2"))
    assert decide(dataclasses.replace(after, digest="b")).act is RunAction.STOP
    assert decide(after).phase is RunPhase.FAILED, "they were left out, and it failed again"


def test_a_preflight_that_names_no_node_or_too_many_fails_the_run():
    assert decide(preflight()).phase is RunPhase.FAILED
    found = decide(preflight(*(f"n{i}" for i in range(EXCLUDE_AT_MOST + 1))))
    assert (found.act, found.phase) == (RunAction.NOTHING, RunPhase.FAILED)
    assert "4 nodes to leave out: n0 (eth0 is slow), n1 " in found.cause
    assert "n3 (eth0 is slow); at most 3 are excluded" in found.cause
    assert decide(preflight("n1", end="COMPLETED")).phase is RunPhase.SUCCEEDED


def stuck(waited_s=STUCK_S, **values):
    first = PodSeen(name="p0", index=0, waited_s=waited_s)
    return seen(**{"pods": [first, *RUNNING[1:]], "nodes": "2:3", "least": 2, **values})


def test_the_first_pod_takes_the_node_of_the_last_one():
    found = decide(stuck())
    assert (found.act, found.targets) == (RunAction.EVICT, ("p2",))


def test_pods_stay_where_the_first_one_may_still_get_a_node_or_too_few_would_be_left():
    assert decide(stuck(waited_s=STUCK_S - 1)).act is RunAction.NOTHING
    assert decide(stuck(least=3)).act is RunAction.NOTHING
    leaving = PodSeen(name="p2", index=2, node="n2", phase="Running", is_leaving=True)
    first = PodSeen(name="p0", index=0, waited_s=STUCK_S)
    assert decide(stuck(pods=[first, RUNNING[1], leaving], least=1)).act is RunAction.NOTHING
