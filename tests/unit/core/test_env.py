"""Who this process is, as its environment says."""

import os

import pytest

from penstock.core.env import Ranks, local_world_size, num_cores, ranks, rendezvous

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PENSTOCK_RENDEZVOUS")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_a_process_that_nobody_launched_is_alone() -> None:
    assert ranks() == Ranks(rank=0, world_size=1, local_rank=0)
    assert local_world_size() == 1
    assert rendezvous() == "env://"


def test_a_launched_process_is_who_its_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ("5", "8", "1", "4", "file:///x"), strict=True):
        monkeypatch.setenv(name, value)
    assert ranks() == Ranks(rank=5, world_size=8, local_rank=1)
    assert local_world_size() == 4
    assert rendezvous() == "file:///x"


def test_without_a_count_for_this_machine_all_processes_are_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert local_world_size() == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux")
def test_the_cores_counted_are_those_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert num_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert num_cores() == len(allowed)
