"""`penstock launch local`: nodes that are killed, come and go on this machine; what is refused before."""

import json
import os
import signal

import pytest

from penstock.launch.job_folder import JobFolder
from tests.in_process import run_cli
from tests.launched import (
    disturb,
    events_of,
    losses_of,
    newest_step,
    ranks_of,
    trained_step,
    wait_until,
    write_recipe,
)
from tests.warm import Command, penstock

STEPS = 40


@pytest.fixture
def made(corpus, tmp_path):
    """A recipe, and the folder of its run."""
    run = tmp_path / "run"
    return write_recipe(tmp_path / "recipe.toml", corpus, run=run, steps=STEPS), run


def audit_of(run):
    return json.loads(run_cli("data", "audit", run, "--json").stdout)


@pytest.mark.timeout(900)  # half a minute's work for two cores of their own
def test_nodes_come_go_and_die_and_every_sample_is_trained_on_once(corpus, tmp_path):
    run = tmp_path / "run"
    recipe = write_recipe(tmp_path / "recipe.toml", corpus, run=run, steps=100_000, every=4)
    code, rows = disturb(recipe, run, seed=3, num_events=3)
    assert code == 75
    assert {row["event"] for row in rows} == {"kill", "join", "leave"}
    assert [row["redone"] for row in rows if row["event"] != "kill"] == [0] * sum(
        row["event"] != "kill" for row in rows
    ), rows
    found = audit_of(run)
    assert (found["samples"], found["faults"]) == (found["steps"] * 12, []), "each once, in order"
    assert set(found["ranks"]) == {1, 2, 3}
    assert not ranks_of(run), "orphans"
    said = run_cli("launch", "resize", run, 7).stderr
    assert "launched for 1:3 nodes (got '7'). Give a number in that range" in " ".join(said.split())
    said = run_cli("launch", "status", run).stdout
    assert "ENDED" in said
    assert "stop requested by SIGTERM" in said


def test_records_of_lost_steps_are_not_taken_for_steps_of_the_next_start(tmp_path):
    folder = JobFolder(tmp_path)
    folder.make()
    folder.log_event("start", cause="start 1 of this node, from the beginning", nodes=3, first_rank=0)
    records = [
        {"event": "start", "step": 0, "ranks": 3},
        *({"step": n, "loss": 1.0, "grad_norm": 1.0} for n in range(1, 13)),
    ]
    write_records(tmp_path, records)
    assert trained_step(tmp_path) == 12
    folder.log_event("start", cause="start 2 of this node, checkpoint 4", nodes=2, first_rank=0)
    assert (newest_step(tmp_path), trained_step(tmp_path)) == (12, 0), "a node was killed; its ranks begin"
    write_records(tmp_path, [*records[:5], {"event": "start", "step": 4, "ranks": 2}])
    assert trained_step(tmp_path) == 0
    write_records(tmp_path, [*records[:5], {"event": "start", "step": 4, "ranks": 2}, records[5]])
    assert trained_step(tmp_path) == 5


def write_records(run, records):
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


@pytest.mark.timeout(600)
def test_a_killed_rank_is_started_again_and_another_terminal_stops_the_run(made, tmp_path):
    recipe, run = made
    words = ["launch", "local", str(recipe), "--nodes", "2", "--grace", "60"]
    out = (tmp_path / "out").open("wb")
    launcher = Command(*words, interpreter="it is stopped and killed", stdout=out, stderr=out)
    try:

        def is_alive():
            return launcher.poll() is None

        wait_until(lambda: newest_step(run) > 12, "step 13", alive=is_alive)
        os.kill(ranks_of(run)[1], signal.SIGKILL)
        wait_until(lambda: len([e for e in events_of(run) if "ranks" in e]) == 2, "a restart", alive=is_alive)
        again = penstock(*words)
        assert again.returncode == 1
        assert "is in use by job" in " ".join(again.stderr.split())
        wait_until(lambda: newest_step(run) > 14, "step 15", alive=is_alive)
        done = run_cli("launch", "cancel", run)
        assert done.returncode == 0 or newest_step(run) == STEPS, done.stderr
        assert launcher.wait(120) in (75, 0)
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait()
        out.close()
    causes = [event["cause"] for event in events_of(run)]
    assert any("Rank 1 was killed by SIGKILL" in cause and "again" in cause for cause in causes), causes
    logs = run_cli("launch", "logs", run, "--rank", 1)
    assert (logs.returncode, logs.stdout.count("rank 1 of 2 ---")) == (0, 2)
    resumed = penstock(*words)
    assert resumed.returncode == 0, resumed.stderr
    assert audit_of(run)["faults"] == []
    whole = tmp_path / "whole"
    alone = penstock(*words, "--set", f"run.dir={whole}")
    assert alone.returncode == 0, alone.stderr
    assert losses_of(run) == losses_of(whole), "every digit of every step"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("nodes", ["1:2", "2"])
def test_a_stop_by_request_is_for_good_until_the_run_is_launched_again(corpus, tmp_path, nodes):
    run = tmp_path / "run"
    recipe = write_recipe(tmp_path / "recipe.toml", corpus, run=run, steps=100_000, every=1000)
    words = ["launch", "local", str(recipe), "--nodes", nodes]
    for least in (5, 10):
        with (tmp_path / "out").open("wb") as out:
            launcher = Command(*words, stdout=out, stderr=out)
        try:
            begin = newest_step(run)
            wait_until(
                lambda begin=begin, least=least: newest_step(run) >= begin + least,
                "a step",
                alive=lambda launcher=launcher: launcher.poll() is None,
            )
            asked = run_cli("control", run, "--stop")
            assert asked.returncode == 0, asked.stderr
            assert launcher.wait(120) == 75
        finally:
            if launcher.poll() is None:
                launcher.kill()
                launcher.wait()
    causes = [event["cause"] for event in events_of(run) if event["event"] == "finish"]
    told = f"stopped by request, newest checkpoint {newest_step(run)}"
    assert any(told in cause for cause in causes), causes
    assert "stopped by request" in run_cli("launch", "status", run).stdout
    assert not any("the nodes changed" in event.get("cause", "") for event in events_of(run))


def test_starts_without_progress_are_given_up_with_a_code_of_their_own(made):
    recipe, run = made
    words = ("--nodes", 2, "--idle-starts", 2, "--env", "GLOO_SOCKET_IFNAME=nosuch0")
    done = penstock("launch", "local", recipe, *words)
    assert done.returncode == 76, done.stderr
    finish = events_of(run)[-1]
    assert (finish["event"], finish["code"]) == ("finish", 76)
    assert "nosuch0" in finish["cause"]
    assert "2 starts in a row without a new checkpoint: given up" in finish["cause"]


def test_a_dry_run_shows_everything_and_starts_nothing(made):
    recipe, run = made
    done = run_cli("launch", "local", recipe, "--nodes", "1:3", "--dry-run", "--explain")
    assert done.returncode == 0, done.stderr
    for said in (
        "devices: 1:3 x 1",
        "rendezvous=c10d  # ",
        "stop_within_s = 55",
        "no ceiling of device-hours",
    ):
        assert said in done.stdout
    shown = json.loads(run_cli("launch", "local", recipe, "--nodes", 2, "--dry-run", "--json").stdout)
    assert shown["spec"]["nodes"] == {"least": 2, "most": 2}
    assert len(shown["commands"]) == 2
    assert not run.exists()


def refused(recipe, *words):
    done = penstock("launch", "local", recipe, *words)
    assert "Traceback" not in done.stderr
    return done.returncode, " ".join(done.stderr.split())


def test_a_batch_that_does_not_divide_over_every_size_is_refused(made):
    code, said = refused(made[0], "--nodes", "2:5")
    assert code == 2
    assert "does not divide over 5 ranks" in said
    assert "Sizes of --nodes 2:5 that would do: 2, 3, 4" in said


def test_a_secret_in_the_recipe_is_refused(made):
    code, said = refused(made[0], "--set", "measure.wandb_api_key=abcdefgh")
    assert code == 2
    assert "--secret NAME=file:PATH" in said
    assert "abcdefgh" not in said


def test_a_grace_shorter_than_a_measured_step_and_save_is_refused(made):
    recipe, run = made
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "step_s": 4.0, "checkpoint_s": 9.0}\n')
    code, said = refused(recipe, "--grace", "12")
    assert code == 2
    assert "a step of 4.0 s, a save of 9.0 s" in said
    assert "Give --grace 19 or more" in said


def test_more_nodes_than_the_cluster_has_are_refused(made):
    code, said = refused(made[0], "--nodes", "12", "--processes", "1", "--cluster", "h100-ethernet")
    assert code == 2
    assert "The cluster has 8 nodes, so the run could never start" in said


@pytest.mark.parametrize(
    ("words", "code", "words_said"),
    [
        (("--network", "nosuch0"), 1, "This node lacks networks of the run: nosuch0"),
        (("--secret", "KEY=file:/nosuch"), 2, "The file /nosuch, which holds the secret KEY, is empty or"),
    ],
)
def test_a_network_or_secret_that_does_not_exist_is_refused_and_nothing_is_left(
    made, words, code, words_said
):
    recipe, run = made
    found, said = refused(recipe, "--nodes", "2", *words)
    assert (found, words_said in said) == (code, True), said
    assert not run.exists()


def test_a_run_that_was_not_launched_is_told_so(tmp_path):
    for words in (("status",), ("logs",), ("cancel",), ("resize",)):
        done = penstock("launch", *words, tmp_path, *(["2"] if words == ("resize",) else []))
        assert done.returncode == 2
        assert "was not started by `penstock launch`" in " ".join(done.stderr.split())
