"""`penstock train --set plan=auto` as a user types it: planned on the machine at hand, recorded, kept."""

import json

import pytest

from tests.warm import penstock


def resolved(recipe):
    return json.loads((recipe.parent / "run" / "config.json").read_text())


def trained(recipe, *words, processes=2):
    done = penstock("train", recipe, "--set", "run.steps=4", "--processes", processes, *words)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_run_is_planned_on_the_machines_it_finds_and_goes_on_as_planned(recipe):
    said = trained(recipe, "--set", "plan=auto")
    assert " plans for " in said
    assert " tokens/s a device (within " in said
    first = resolved(recipe)
    degrees = first["parallel"]
    product = degrees["shard"] * degrees["replicate"] * degrees["tensor"] * degrees["pipeline"]
    assert (first["plan"], product * degrees["context"]) == ("auto", 2)
    assert first["data"]["micro_batch_size"]
    said = trained(recipe, "--set", "plan=auto", "--set", "run.steps=6")
    assert "Planned as before" in said
    assert resolved(recipe)["parallel"] == degrees
    assert "planned as before" not in trained(recipe, "--set", "plan=again", "--set", "run.steps=8")


def test_what_the_user_sets_stays_and_other_ranks_are_planned_anew(recipe):
    words = ("--set", "plan=auto", "--set", "parallel.tensor=2", "--set", "recompute.policy=full")
    trained(recipe, *words)
    first = resolved(recipe)
    assert (first["parallel"]["tensor"], first["recompute"]["policy"]) == (2, "full")
    said = trained(recipe, "--set", "plan=auto", "--set", "run.steps=6", processes=1)
    assert "planned as before" not in said
    assert resolved(recipe)["parallel"]["tensor"] == 1


def test_a_plan_is_shown_before_anything_runs(recipe):
    done = penstock("train", recipe, "--set", "plan=auto", "--processes", 4, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    parallel = json.loads(done.stdout)["recipe"]["parallel"]
    assert parallel["shard"] > 0
    assert not (recipe.parent / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "plan=vela"), "has 128 devices, and the run 2 ranks"),
        (("--set", "plan=velo", "--dry-run"), "Did you mean 'vela'"),
        (
            ("--set", "plan=auto", "--set", "parallel.tensor=2", "--set", "parallel.shard=2", "--dry-run"),
            "No layout shares",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_refused_once_with_what_to_do(recipe, words, message):
    done = penstock("train", recipe, "--processes", 2, *words)
    said = " ".join(done.stderr.split())
    assert done.returncode == 2
    assert said.count(message) == 1
