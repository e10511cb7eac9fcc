"""The planned memory of more steps than test_planned_memory.py measures: `make soak PART=memory`."""

import pytest
from tests.ranks.test_planned_memory import CASES, SHORT, compare


@pytest.mark.parametrize("name", [name for name in CASES if name not in SHORT])
def test_the_planned_peak_of_a_step_is_the_measured_one(tmp_path, name):
    compare(name, tmp_path)
