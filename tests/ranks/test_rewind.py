"""A run in trouble goes back to before it, leaves out the data in between, and ends as one whole run."""

import json
import math
import os
import shutil
import signal
from dataclasses import replace

import pytest

from penstock.core.signals import StopFlag
from penstock.launch import local as local_run
from penstock.nn.dtensor import detached_local
from penstock.obs.sinks.jsonl import read_records
from penstock.parallel.layout import ParallelConfig
from penstock.testing.corpora import write_corpus
from penstock.train.data_setup import train_loader
from penstock.train.guard import StepGuard
from penstock.train.inspect.audit import audit
from penstock.train.inspect.open_run import open_run
from penstock.train.optim.optimizer import Optimizer
from penstock.train.recipe.config import CheckpointConfig
from penstock.train.recipe.outer_config import OuterConfig
from penstock.train.resolve.load import build_recipe
from penstock.train.run import run


def recipe_of(corpus, folder, **guard):
    return build_recipe(
        {
            "run": {"dir": str(folder), "steps": 12, "log_samples": True},
            "model": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
            },
            "data": {
                "corpora": {"c": {"path": str(corpus)}},
                "sequence_length": 16,
                "global_batch_size": 4,
            },
            "checkpoint": {"every": 2, "keep": 9},
            "guard": guard,
            "compute": "float32",
        }
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    documents = [[1 + i % 40 for i in range(9 + n)] for n in range(150)]
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents, vocab_size=48)


def train(recipe, monkeypatch, bad_steps, *, times, killed_at=None):
    """Train on two processes; the first `times` times that each of the steps is taken, its loss is nan.

    Args:
        killed_at: when all of them were, the step at which the processes are.
    """
    left, judge = dict.fromkeys(bad_steps, times), StepGuard.judge

    def troubled(self, loss, grad_norm, *, step):
        if step == killed_at and not any(left.values()):
            os.kill(os.getpid(), signal.SIGKILL)
        if left.get(step):
            left[step] -= 1
            loss = math.nan
        return judge(self, loss, grad_norm, step=step)

    monkeypatch.setattr(StepGuard, "judge", troubled)
    return local_run.run(lambda: int(not run(recipe, StopFlag())), lambda error: (str(error), 1), processes=2)


def test_a_skipped_step_changes_nothing_and_the_run_goes_on(corpus, tmp_path, monkeypatch):
    recipe = recipe_of(corpus, tmp_path / "run")
    assert train(recipe, monkeypatch, [4, 5], times=1).code == 0
    records = list(read_records(tmp_path / "run" / "metrics.jsonl"))
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, *range(6, 13)]
    said = [record for record in records if record.get("event") == "skipped"]
    assert [record["step"] for record in said] == [4, 5]
    assert said[0]["why"].startswith("The loss of step 4 is nan")
    kept = {path.name[-2:] for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {"02", "06", "08", "10", "12"}, "none of a step that was not taken"
    result = audit(tmp_path / "run", progress=lambda *_: None)
    assert not result.faults
    assert (result.samples, result.skipped_steps, result.skipped_samples) == (10 * 4, 2, 2 * 4)
    assert result.tokens == 10 * 4 * 16, "of the steps that were taken"


@pytest.fixture(scope="module")
def untroubled(corpus, tmp_path_factory):
    """A run that ended."""
    recipe = recipe_of(corpus, tmp_path_factory.mktemp("untroubled"))
    assert (
        local_run.run(lambda: int(not run(recipe, StopFlag())), lambda e: (str(e), 1), processes=2).code == 0
    )
    return recipe.run.dir


def test_an_audit_says_which_samples_have_no_checksum(untroubled, tmp_path):
    """As in logs of another writer; a log with too few is damaged."""
    shutil.copytree(untroubled, tmp_path / "run")
    for path in (tmp_path / "run" / "samples").iterdir():
        records = list(read_records(path))
        for record in records:
            if record["step"] in (3, 7):
                del record["crc32"]
            elif record["step"] == 9 and path.name == "rank-00001.jsonl":
                record["crc32"].pop()
            elif record["step"] == 11:
                del record["sample_ids"], record["crc32"]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = audit(tmp_path / "run", progress=lambda *_: None)
    first, second = result.faults
    assert first == "step 9: a rank logged 1 checksums of 2 samples"
    assert second.startswith("step 11: missing")
    assert result.unchecked_samples == 2 * 4 + 2
    assert result.samples == 11 * 4


def test_an_audit_names_steps_that_were_not_logged_in_one_line(untroubled, tmp_path):
    """As when run.log_samples was turned on in the middle."""
    shutil.copytree(untroubled, tmp_path / "run")
    for path in (tmp_path / "run" / "samples").iterdir():
        records = [record for record in read_records(path) if record["step"] not in (1, 2, 3, 4, 5, 6, 9)]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = audit(tmp_path / "run", progress=lambda *_: None)
    assert [fault.partition(":")[0] for fault in result.faults] == ["steps 1 to 6", "step 9"]
    assert result.num_faults == 7
    assert result.samples == 5 * 4


def test_too_many_skipped_steps_go_back_to_before_them_without_their_data(corpus, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    recipe = recipe_of(corpus, folder, max_skips=1)
    whole = train_loader(recipe, rank=0, world_size=1, deliver="numpy")
    order = [whole.samples_of(step).tolist() for step in range(12)]
    assert train(recipe, monkeypatch, [5, 7], times=1).code == 0
    records = list(read_records(folder / "metrics.jsonl"))
    assert [record["step"] for record in records if "loss" in record] == list(range(1, 13)), "each step once"
    assert (folder / "checkpoints" / "aside-step-00000006").is_dir(), "newer than the trouble"
    result = audit(folder, progress=lambda *_: None)
    assert not result.faults
    assert result.steps == 12
    loader = open_run(folder).loader
    assert loader.samples_of(3).tolist() == order[3]
    assert loader.samples_of(4).tolist() == order[7], "the data of steps 5 to 7 is left out"


def test_islands_go_back_in_the_middle_of_an_exchange(corpus, tmp_path, monkeypatch):
    """The one under way is forgotten with the model; that of the checkpoint goes on."""
    recipe = recipe_of(corpus, tmp_path / "run", max_skips=0)
    parallel, outer = ParallelConfig(replicate=2, shard=1), OuterConfig(every=4, overlap=3)
    recipe = replace(recipe, parallel=parallel, outer=outer, checkpoint=CheckpointConfig(every=5))
    assert train(recipe, monkeypatch, [6], times=1).code == 0
    result = audit(tmp_path / "run", progress=lambda *_: None)
    assert not result.faults
    assert result.steps == 12


def test_a_second_rewind_leaves_out_what_the_first_did_too(corpus, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    recipe = recipe_of(corpus, folder, max_skips=1)
    whole = train_loader(recipe, rank=0, world_size=1, deliver="numpy")
    order = [whole.samples_of(step).tolist() for step in range(12)]
    assert train(recipe, monkeypatch, [5, 6], times=2).code == 0
    loader = open_run(folder).loader
    assert loader.samples_of(1).tolist() == order[1]
    assert loader.samples_of(2).tolist() == order[8], "all from there to the trouble, twice"
    assert not audit(folder, progress=lambda *_: None).faults


def test_what_a_rewind_left_out_stays_out_when_the_run_is_killed_before_the_next_checkpoint(
    corpus, tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    recipe = recipe_of(corpus, folder, max_skips=1)
    whole = train_loader(recipe, rank=0, world_size=1, deliver="numpy")
    order = [whole.samples_of(step).tolist() for step in range(12)]
    assert train(recipe, monkeypatch, [5, 7], times=1, killed_at=6).code != 0
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert "step-00000004" in names, "from before the trouble"
    assert "step-00000006" not in names
    monkeypatch.undo()
    assert train(recipe, monkeypatch, [], times=0).code == 0
    assert open_run(folder).loader.samples_of(4).tolist() == order[7]
    assert not audit(folder, progress=lambda *_: None).faults


def test_trouble_that_comes_back_ends_the_run_with_what_to_do(corpus, tmp_path, monkeypatch):
    recipe = recipe_of(corpus, tmp_path / "run", max_skips=0, max_rewinds=2)
    outcome = train(recipe, monkeypatch, [5], times=99)
    assert outcome.code == 1
    (said,) = outcome.messages
    assert said.startswith("The loss of step 5 is nan")
    assert "the weights were not changed. Lower optim.learning_rate" in said
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {"step-00000002", "step-00000004", "aside-step-00000004"}, "the second went further back"


def test_each_rewind_goes_one_checkpoint_further_back_until_there_is_none(corpus, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    recipe = recipe_of(corpus, folder, max_skips=0, max_rewinds=4)
    assert train(recipe, monkeypatch, [7], times=4).code == 0
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert {"aside-step-00000004", "aside-step-00000006"} <= names
    records = list(read_records(folder / "metrics.jsonl"))
    starts = [record["step"] for record in records if record.get("event") == "start"]
    assert starts[-1] == 2, "the third and the fourth, as there is no older one"
    assert not audit(folder, progress=lambda *_: None).faults


def test_weights_that_are_not_finite_are_not_saved_and_the_run_goes_back_to_sound_ones(
    corpus, tmp_path, monkeypatch
):
    """A step with a finite loss and gradient makes them: as an optimizer can whose numbers overflow."""
    folder, step, broken = tmp_path / "run", Optimizer.step, []

    def overflow(self, closure=None, **options):
        step(self, closure, **options)
        for parameter, states in list(self.state.items())[:1]:
            if int(states["step"]) == 6 and not broken:
                broken.append(6)
                detached_local(parameter)[-1:].fill_(math.inf)

    monkeypatch.setattr(Optimizer, "step", overflow)
    recipe = recipe_of(corpus, folder, max_skips=0)
    outcome = local_run.run(lambda: int(not run(recipe, StopFlag())), lambda e: (str(e), 1), processes=2)
    assert outcome.code == 0, outcome.messages
    names = {path.name[-2:] for path in (folder / "checkpoints").iterdir()}
    assert names == {"02", "04", "06", "08", "10", "12"}, "06 of the second attempt"
    assert not [path for path in (folder / "checkpoints").iterdir() if path.name.startswith("aside")]
    result = audit(folder, progress=lambda *_: None)
    assert (result.num_faults, result.steps) == (0, 12)


def test_a_run_that_ends_with_weights_that_are_not_finite_says_so(corpus, tmp_path, monkeypatch):
    folder, step = tmp_path / "run", Optimizer.step

    def overflow(self, closure=None, **options):
        step(self, closure, **options)
        for parameter, states in list(self.state.items())[:1]:
            if int(states["step"]) == 12:
                detached_local(parameter)[-1:].fill_(math.nan)

    monkeypatch.setattr(Optimizer, "step", overflow)
    recipe = recipe_of(corpus, folder)
    outcome = local_run.run(lambda: int(not run(recipe, StopFlag())), lambda e: (str(e), 1), processes=2)
    assert outcome.code == 1
    (said,) = outcome.messages
    assert "holds numbers that are not finite" in said
    assert "Lower optim.learning_rate" in said
    assert "it resumes from step-00000010" in said
    assert not (folder / "checkpoints" / "step-00000012").exists()


def test_a_run_without_a_checkpoint_from_before_ends_at_once(corpus, tmp_path, monkeypatch):
    recipe = recipe_of(corpus, tmp_path / "run", max_skips=0)
    outcome = train(recipe, monkeypatch, [1], times=1)
    assert outcome.code == 1
    assert outcome.messages[0].startswith("The loss of step 1 is nan")
