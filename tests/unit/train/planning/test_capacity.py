"""What a machine can take: processes against its cores, and planned bytes against its memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import env
from penstock.core.errors import ConfigError, UsageError
from penstock.launch import local
from penstock.launch.local import check_processes
from penstock.parallel.layout import layout_of
from penstock.train.planning import capacity
from penstock.train.planning.capacity import (
    REFUSED_ABOVE,
    WARNED_ABOVE,
    RunMemory,
    check_device,
    check_host,
    may_have_accelerators,
    memory_of,
)
from penstock.train.planning.memory import memory_plan
from tests.examples import examples
from tests.unit.train.planning.test_memory_plan import raw, recipe_of  # noqa: F401 - a fixture

GIB = 2**30


@pytest.mark.parametrize(("cores", "processes"), [(1, 4), (2, 8), (64, 256)])
def test_four_processes_are_started_on_each_core_and_not_one_more(monkeypatch, cores, processes):
    monkeypatch.setattr(local, "num_cores", lambda: cores)
    check_processes(processes)
    with pytest.raises(UsageError, match=f"at most {processes}, 4 for each core"):
        check_processes(processes + 1)
    check_processes(100_000, oversubscribe=True)


@pytest.mark.parametrize("oversubscribe", [None, False, True])
def test_at_least_one_process_is_started(oversubscribe):
    with pytest.raises(UsageError, match="at least 1"):
        check_processes(0, oversubscribe=oversubscribe)


def test_a_command_without_the_option_does_not_name_it():
    with pytest.raises(UsageError) as said:
        check_processes(100_000)
    assert "--oversubscribe" not in str(said.value)


@examples(50)
@given(st.floats(0.0, 3.0), st.integers(1, 64), st.booleans())
def test_a_run_is_refused_above_what_is_there_and_warned_of_before(share, gib, oversubscribe):
    said, refused = [], ""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(capacity.log, "warning", lambda *words, **_: said.append(words))
    needed = round(share * gib * GIB)
    try:
        check_device(RunMemory(host=0, device=needed), gib * GIB, name="GPU", oversubscribe=oversubscribe)
    except ConfigError as error:
        refused = str(error)
    monkeypatch.undo()
    assert ("--oversubscribe starts it" in refused) == (
        needed > REFUSED_ABOVE * gib * GIB and not oversubscribe
    )
    assert bool(said) == (needed > WARNED_ABOVE * gib * GIB and not refused)


def test_the_memory_of_a_machine_is_that_of_its_control_group(monkeypatch):
    monkeypatch.setattr(env, "memory_bytes", lambda: 10 * GIB)
    check_host(RunMemory(host=9 * GIB, device=0), here=2, oversubscribe=False)
    with pytest.raises(ConfigError, match=r"needs 14.0 GiB of memory on this machine, for 2 processes, and"):
        check_host(RunMemory(host=14 * GIB, device=0), here=2, oversubscribe=False)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_on_processors_take_what_is_planned_and_copies_of_what_they_save(raw, ranks):  # noqa: F811
    config = recipe_of(raw)
    found = memory_of(config, world_size=ranks, here=ranks, on_cpu=True)
    planned = memory_plan(config, layout_of(config.parallel, world_size=ranks), on_cpu=True)
    least = ranks * planned.total
    assert least < found.host < least + ranks * (planned.weights + planned.optimizer) + 2**20
    assert found.device == 0


def test_ranks_on_accelerators_share_the_machine_only_for_copies_and_what_is_offloaded(raw):  # noqa: F811
    config = recipe_of(raw)
    there = memory_of(config, world_size=2, here=2, on_cpu=False)
    assert there.device == memory_plan(config, layout_of(config.parallel, world_size=2), on_cpu=False).total
    away = memory_of(recipe_of(raw, "parallel.offload=true"), world_size=2, here=2, on_cpu=False)
    assert away.device < there.device
    assert away.host > there.host


@pytest.mark.parametrize("file", ["dev/nvidia0", "dev/kfd", "dev/accel/accel0", "dev/dri/renderD128"])
def test_a_machine_with_a_device_of_any_maker_may_have_accelerators(tmp_path, monkeypatch, file):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not may_have_accelerators(tmp_path)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    assert may_have_accelerators(tmp_path)
