"""An elastic run on one machine that is disturbed again and again: `make soak PART=faults`."""

import pytest

from tests.e2e.test_launch_local import audit_of
from tests.launched import disturb, ranks_of, write_recipe


@pytest.mark.timeout(1100)
@pytest.mark.parametrize("seed", [3, 8])
def test_nodes_come_go_and_die_all_the_time_and_every_sample_is_trained_on_once(corpus, tmp_path, seed):
    run = tmp_path / "run"
    recipe = write_recipe(tmp_path / "recipe.toml", corpus, run=run, steps=100_000, every=4)
    code, rows = disturb(recipe, run, seed=seed, num_events=14)
    assert code == 75
    assert {row["event"] for row in rows} == {"kill", "join", "leave"}
    assert not [row for row in rows if row["event"] != "kill" and row["redone"]], rows
    found = audit_of(run)
    assert (found["samples"], found["faults"]) == (found["steps"] * 12, []), "each once, in order"
    assert set(found["ranks"]) == {1, 2, 3}
    assert not ranks_of(run), "orphans"
