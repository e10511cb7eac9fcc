"""Tasks during training: the scores that `penstock eval` gives the checkpoint; training is untouched."""

from dataclasses import replace

import pytest
from tests.made_tasks import TEXT, own_cache, save_tasks
from tests.run_records import data_of

from penstock.core.errors import UsageError
from penstock.data.corpus.manifest import load_manifest, save_manifest
from penstock.engine.config import EngineConfig
from penstock.engine.llm import LLM
from penstock.evaluation.evaluate import evaluate
from penstock.evaluation.options import EvaluationOptions
from penstock.evaluation.tables import scores_of
from penstock.evaluation.tasks import load_tasks
from penstock.obs.run_data.summary import summary_of
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.text.tokenizer import train_tokenizer
from penstock.train.live_tasks import LiveTasks
from penstock.train.recipe.config import EvaluateConfig
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state, write_identity


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A recipe and task files; data sets leave nothing in the user's cache."""
    folder = tmp_path_factory.mktemp("tasks")
    files = [str(path) for path in save_tasks(folder, questions=6) if path.stem != "made_rolling"]
    tokenizer = train_tokenizer([TEXT] * 3, vocab_size=280)
    documents = [tokenizer.encode(TEXT[start:]) for start in range(0, 100, 3)]
    write_corpus(folder / "text", documents, vocab_size=280)
    tokenizer.save(folder / "text" / "tokenizer.json")
    save_manifest(folder / "text", replace(load_manifest(folder / "text"), tokenizer=tokenizer.fingerprint))
    recipe = build_recipe(
        {
            "run": {"dir": str(folder / "run"), "steps": 4},
            "model": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "max_position_embeddings": 256,
            },
            "data": {
                "corpora": {"text": {"path": str(folder / "text")}},
                "sequence_length": 64,
                "global_batch_size": 4,
            },
            "evaluate": {"tasks": files, "every": 3},
            "checkpoint": {"every": 3},
            "compute": "float32",
        }
    )
    with own_cache(tmp_path_factory.mktemp("hf")):
        yield recipe


def trained(recipe, world, folder, *, asks=True):
    config = replace(recipe, run=replace(recipe.run, dir=str(folder)))
    state = open_state(config, world)
    if world.is_first:
        write_identity(config, state.loader)
    state.tasks = LiveTasks(config, world) if asks else None
    return records_of(state, config, world)


def evaluations(records):
    return [record for record in records if record.get("event") == "evaluation"]


def test_the_scores_are_those_of_the_checkpoint_and_losses_those_without(made, tmp_path):
    (records,) = on_ranks(lambda world: trained(made, world, tmp_path / "run"), ranks=1)
    assert [record["step"] for record in evaluations(records)] == [3, 4]
    options = EvaluationOptions(limit=100, bootstrap=0)
    tasks = load_tasks(made.evaluate.tasks, options)
    for record, checkpoint in zip(evaluations(records), ("00000003", "00000004"), strict=True):
        path = tmp_path / "run" / "checkpoints" / f"step-{checkpoint}"
        with LLM(path, EngineConfig(device="cpu")) as llm:
            found = scores_of(evaluate(llm, tasks, options, name="run"))
        assert record["task_scores"] == pytest.approx({name: value for name, (value, _) in found.items()})

    (without,) = on_ranks(lambda world: trained(made, world, tmp_path / "b", asks=False), ranks=1)
    losses = [[(r["loss"], r["grad_norm"]) for r in each if "loss" in r] for each in (records, without)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4

    tables = {table["title"]: table["rows"] for table in summary_of(data_of(records), {})["tables"]}
    (row,) = [row for row in tables["Tasks"] if row[0] == "made_choice acc"]
    assert row[1].endswith("(step 3)")
    assert data_of(records).num_damaged == data_of(without).num_damaged == 0


def test_two_ranks_give_the_scores_of_one(made, tmp_path):
    (alone,) = on_ranks(lambda world: trained(made, world, tmp_path / "a"), ranks=1)
    first, second = on_ranks(lambda world: trained(made, world, tmp_path / "b"), ranks=2)
    assert evaluations(second) == []
    for one, other in zip(evaluations(alone), evaluations(first), strict=True):
        assert one["task_scores"] == pytest.approx(other["task_scores"], rel=1e-3)


def test_a_wrong_task_is_refused_on_all_ranks_before_the_first_step(made, tmp_path):
    wrong = replace(made, evaluate=EvaluateConfig(tasks=("./none.yaml",), every=1))

    def fails(world):
        with pytest.raises(UsageError, match=r"evaluate\.tasks: The task file none\.yaml does not exist"):
            trained(wrong, world, tmp_path)
        return True

    assert on_ranks(fails, ranks=2) == [True, True]


def test_an_evaluation_that_fails_is_recorded_and_training_goes_on(made, tmp_path):
    chats = replace(made, evaluate=replace(made.evaluate, chat_template=True))
    (records,) = on_ranks(lambda world: trained(chats, world, tmp_path / "run"), ranks=1)
    failed = [record for record in records if record.get("event") == "evaluation_failed"]
    assert len(failed) == 2
    assert "no chat template" in failed[0]["why"]
    assert sum("loss" in record for record in records) == 4
