"""Requests on several ranks: taken up at one step by all, parts of a corpus that some rank cannot see too."""

import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from penstock.core import env
from penstock.core.errors import CorpusError
from penstock.core.files import checksum
from penstock.data.corpus.manifest import load_manifest, save_manifest
from penstock.obs.meter import StepMeter
from penstock.parallel.mesh import broadcast
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.train.control.listener import Control
from penstock.train.control.requests import ControlRequest, answers, submit
from penstock.train.loop import train
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

DOCUMENTS = [[1 + i % 9] * 20 for i in range(60)]


def append(folder, number):
    """Give a corpus another part of as many documents."""
    new = write_corpus(folder.parent / f"{folder.name}-{number}", DOCUMENTS, vocab_size=10)
    manifest, more = load_manifest(folder), load_manifest(new)
    shards = []
    for entry in more.shards:
        name = f"part-{number}-{entry.name}"
        (new / entry.name).rename(folder / name)
        shards.append(replace(entry, name=name, checksum=checksum(folder / name), probe=""))
    ends = (*manifest.part_ends, len(manifest.shards) + len(shards))
    save_manifest(folder, replace(manifest, shards=(*manifest.shards, *shards), parts=ends))


@pytest.fixture
def recipe(tmp_path):
    corpora = {name: write_corpus(tmp_path / name, DOCUMENTS, vocab_size=10) for name in ("web", "code")}
    return build_recipe(
        {
            "run": {"dir": str(tmp_path / "run"), "steps": 30},
            "model": {
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
            },
            "data": {
                "corpora": {name: {"path": str(path), "weight": 1} for name, path in corpora.items()},
                "sequence_length": 16,
                "global_batch_size": 4,
            },
            "checkpoint": {"every": 100},
            "compute": "float32",
        }
    )


def going_on(recipe, world, *, stop_at, at=None):
    """Train up to a step; `at(step)` runs on rank 0 before each. Returns the state of the loader."""
    torch.set_num_threads(1)
    state = open_state(recipe, world)
    state.control = Control(recipe, state.loader, world)
    state.control.start()

    def stop_requested():
        if at is not None and world.is_first:
            at(state.step)
        return state.step >= stop_at

    train(
        state,
        recipe,
        world,
        meter=StepMeter(flops_per_token=lambda _: 1, peak_flops=1),
        stop_requested=stop_requested,
        sinks=[],
        on_batch=lambda *_: None,
    )
    return state.loader.state_dict()


def test_requests_are_taken_up_after_the_step_in_which_they_came_by_every_rank(recipe, tmp_path):
    run, asked = (
        tmp_path / "run",
        {
            3: ControlRequest(weights={"web": 0.75}),
            5: ControlRequest(skip_steps=(9, 11), reason="spike"),
            6: ControlRequest(weights={"wbe": 0.5}),
            8: ControlRequest(extend="web"),
        },
    )

    def at(step):
        if step == 7:
            append(tmp_path / "web", 1)
        if step in asked:
            submit(run, asked[step])

    one, two = on_ranks(lambda world: going_on(recipe, world, stop_at=12, at=at), ranks=2)
    assert one == two
    assert [(step, reason) for step, _, reason in one["mix"]] == [(0, "recipe"), (3, "request 1")]
    assert one["skip"] == [[32, 40, "request 2: spike"]]
    assert one["grown"] == [[8, "web", 2]]
    assert [found.taken_up for found in answers(run)] == [True, True, False, True]

    append(tmp_path / "code", 1)
    again, other = on_ranks(lambda world: going_on(recipe, world, stop_at=13), ranks=2)
    assert again == other
    assert again["grown"] == [[8, "web", 2], [12, "code", 2]], "what was appended meanwhile"
    last = on_ranks(lambda world: going_on(recipe, world, stop_at=14), ranks=1)[0]
    assert last["grown"] == again["grown"], "once"


def test_a_launched_run_takes_no_batch_size_that_another_number_of_its_nodes_could_not(
    recipe, tmp_path, monkeypatch
):
    monkeypatch.setenv(env.NODES, "1:2")  # of two processes
    asked = {1: ControlRequest(batch_size=6), 2: ControlRequest(batch_size=8)}

    def at(step):
        if step in asked:
            submit(tmp_path / "run", asked[step])

    on_ranks(lambda world: going_on(recipe, world, stop_at=4, at=at), ranks=2)
    refused, done = answers(tmp_path / "run")
    assert (refused.taken_up, done.taken_up, done.batch_size) == (False, True, 8)
    assert "does not divide over 4 ranks" in refused.said


def has_one_part(_):
    """What a rank sees whose file system has not caught up yet."""
    return 1


def is_gone(_):
    """What a rank sees whose mount is gone."""
    raise CorpusError("no corpus")


@pytest.mark.parametrize("seen", [has_one_part, is_gone])
def test_parts_that_one_rank_cannot_see_are_refused_on_all(recipe, tmp_path, seen):
    def work(world):
        state = open_state(recipe, world)
        control = Control(recipe, state.loader, world)
        control.start()
        if world.is_first:
            append(tmp_path / "web", 1)
            submit(tmp_path / "run", ControlRequest(extend="web"))
        dist.barrier()
        if not world.is_first:
            control._parts_on_disk = seen
        (found,) = control.take_up()
        return found.taken_up, found.said

    one, two = on_ranks(work, ranks=2)
    assert one == two
    assert one[0] is False
    assert "Corpus 'web' has no parts beyond the 1 that the run uses. Add one first" in one[1]


def test_what_one_rank_cannot_apply_is_applied_on_none(recipe, tmp_path):
    def work(world):
        state = open_state(recipe, world)
        control = Control(recipe, state.loader, world)
        control.start()
        before = state.loader.state_dict()
        if world.is_first:
            append(tmp_path / "web", 1)
            submit(tmp_path / "run", ControlRequest(extend="web"))
        else:  # the columns beside it are not there yet

            def lacks(*_, **__):
                raise CorpusError("no columns")

            state.loader.extend_corpus = lacks
        dist.barrier()
        (found,) = control.take_up()
        return found.taken_up, found.said.partition(":")[0], state.loader.state_dict() == before

    assert on_ranks(work, ranks=2) == [(False, "refused", True)] * 2


@pytest.mark.parametrize("value", [None, [], {"a": [1.5, "ü", None]}, "x" * 100_000])
def test_a_value_of_rank_0_reaches_all(value):
    assert on_ranks(lambda world: broadcast(world, value if world.is_first else "not read"), ranks=2) == [
        value,
        value,
    ]


def test_ranks_save_stop_and_change_the_batch_after_one_step_and_again_after_a_resume(recipe, tmp_path):
    """Killed after the batch size changed, the run goes on as one that was not."""
    run = tmp_path / "run"
    asked = {3: ControlRequest(checkpoint=True), 5: ControlRequest(batch_size=8, asked_by="ann")}

    def at(step):
        if step in asked:
            submit(run, asked[step])

    one, two = on_ranks(lambda world: going_on(recipe, world, stop_at=9, at=at), ranks=2)
    assert one == two
    assert one["batch"] == [[0, 4], [5, 8]]
    saved = [found.step for found in answers(run) if found.checkpoint]
    assert saved == [3]
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000009"]

    shutil.rmtree(run / "checkpoints" / names[1])  # as after a kill: back to step 3, before the change
    asked = {12: ControlRequest(stop=True, asked_by="bob"), 7: ControlRequest(batch_size=5)}
    again, other = on_ranks(lambda world: going_on(recipe, world, stop_at=99, at=at), ranks=2)
    assert again == other
    assert again["step"] == 12, "it ends after the step in which it was asked"
    assert again["batch"] == one["batch"], "5 rows cannot be divided over 2 ranks"
    said = [found.said for found in answers(run)]
    assert said[1] == "from step 6 on: 8 rows a step, 4 before"
    assert "refused" in said[2]
    assert said[3] == "a checkpoint is saved after step 12, and the job ends"
    assert [found.asked_by for found in answers(run)] == ["", "ann", "", "bob"]

    submit(run, ControlRequest(stop=True))
    last = on_ranks(lambda world: going_on(recipe, world, stop_at=14), ranks=1)[0]
    assert last["step"] == 14, "a stop is for the job that runs"
    assert not answers(run)[-1].taken_up
