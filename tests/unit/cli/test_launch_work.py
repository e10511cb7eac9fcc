"""The work of a launched node: its processes are counted before torch is imported."""

import pytest
from tests.unit.launch.test_spec import make_spec

from penstock.cli.launch_work import work_of
from penstock.core.env import num_cores
from penstock.core.errors import UsageError
from penstock.launch.local import PROCESSES_PER_CORE


def test_more_processes_than_the_cores_of_a_node_carry_are_refused():
    most = PROCESSES_PER_CORE * num_cores()
    assert callable(work_of(make_spec(processes=most)))
    with pytest.raises(UsageError, match=rf"{most + 1:,} processes on .* --oversubscribe starts them"):
        work_of(make_spec(processes=most + 1))
    command = ("train", "recipe.toml", "--oversubscribe")
    assert callable(work_of(make_spec(processes=most + 1, command=command)))
