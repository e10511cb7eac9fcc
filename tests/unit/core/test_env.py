"""Who this process is, as its environment says."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core import env
from penstock.core.env import Ranks, local_world_size, num_cores, num_threads, ranks, rendezvous
from penstock.core.errors import UsageError

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


@pytest.mark.parametrize("value", ["x", "-1", "1.0", "1e3", "0x1", "9" * 5000, str(2**63)])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("RANK", ranks),
        ("WORLD_SIZE", ranks),
        ("LOCAL_RANK", ranks),
        ("LOCAL_WORLD_SIZE", local_world_size),
        ("MASTER_PORT", env.meeting),
        ("OMP_NUM_THREADS", num_threads),
        ("SLURM_NODEID", env.slurm_task),
        ("SLURM_NNODES", env.slurm_task),
    ],
)
def test_a_launchers_variable_that_is_no_number_is_refused_by_name_and_value(
    name: str, value: str, read: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("SLURM_STEP_ID", "SLURM_NODEID"):
        monkeypatch.setenv(other, "0")
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=rf"variable {name} must be a whole number .* \(got '{value[:7]}"):
        read()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be below WORLD_SIZE, which is 2"),
        ({"RANK": "5"}, "RANK must be below WORLD_SIZE, which is 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be a whole number from 1"),
    ],
)
def test_ranks_outside_of_their_world_are_refused(
    given: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=said):
        ranks()


def test_empty_variables_are_as_if_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    assert ranks() == Ranks(rank=0, world_size=1, local_rank=0)
    assert (local_world_size(), env.meeting()) == (1, None)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux")
def test_the_cores_counted_are_those_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_OWN_GROUPS", Path("/nowhere"))
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert num_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert num_cores() == len(allowed)


def put_in_group(monkeypatch: pytest.MonkeyPatch, root: Path, own: str, files: dict[str, str]) -> None:
    """Put this process into a control group, as /proc/self/cgroup says, and write files of groups."""
    (root / "own").write_text(f"{own}\n")
    for name, text in files.items():
        (root / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "groups" / name).write_text(f"{text}\n")
    monkeypatch.setattr(env, "_OWN_GROUPS", root / "own")
    monkeypatch.setattr(env, "_GROUPS", root / "groups")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/", {"cpu.max": "max 100000"}, 64),
        ("0::/", {"cpu.max": "250000 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "nonsense"}, 64),
        ("0::/job/step", {"cpu.max": "max 100000", "job/cpu.max": "400000 100000"}, 4),
        ("0::/seen/from/outside", {"cpu.max": "300000 100000"}, 3),
        ("3:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "5", "cpu/job/cpu.cfs_period_us": "1"}, 5),
        ("3:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "1"}, 64),
    ],
)
def test_a_container_counts_as_many_cores_as_it_is_granted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, files: dict[str, str], cores: int
) -> None:
    put_in_group(monkeypatch, tmp_path, own, files)
    assert num_cores() == cores


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/job/step", {"job/memory.max": "7", "job/memory.current": "4", "memory.max": "max"}),
        ("2:memory:/job", {"memory/job/memory.limit_in_bytes": "7", "memory/job/memory.usage_in_bytes": "4"}),
    ],
)
def test_the_memory_is_that_of_the_tightest_control_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, files: dict[str, str]
) -> None:
    put_in_group(monkeypatch, tmp_path, own, files)
    assert (env.memory_bytes(), env.available_bytes()) == (7, 3)


def test_ranks_of_a_machine_share_its_cores_unless_threads_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(env, "num_cores", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert num_threads() == 2
    for asked, threads in (("5", 5), ("0", 2), ("4,2", 2)):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        assert num_threads() == threads


def test_what_a_user_says_of_waiting_threads_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    env.sleep_at_barriers()
    assert os.environ["GOMP_SPINCOUNT"] == "7"

    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    env.sleep_at_barriers()
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize(
    "first",
    ["import penstock; penstock.LLM", "from penstock.cli.main import main; main(['recipes', 'list'])"],
)
def test_threads_sleep_soon_in_every_way_into_penstock(first: str) -> None:
    told = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    command = [sys.executable, "-c", f"{first}\nimport torch"]
    shown = subprocess.run(
        command, env=told | {"OMP_DISPLAY_ENV": "VERBOSE"}, capture_output=True, text=True, check=True
    ).stderr
    if "GOMP_SPINCOUNT" not in shown:
        pytest.skip("this torch has another OpenMP than GNU's")
    assert "GOMP_SPINCOUNT = '2000'" in shown
