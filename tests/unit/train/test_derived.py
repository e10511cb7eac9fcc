"""What follows from a recipe before anything runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.core import config
from penstock.core.errors import ConfigError
from penstock.core.units import mib
from penstock.testing.corpora import write_corpus
from penstock.train.recipe.config import TrainConfig
from penstock.train.recipe.planned_changes import check_rows
from penstock.train.recipe.tune_config import TuneConfig
from penstock.train.resolve.load import build_recipe
from penstock.train.resolve.summary import derive
from tests.preferences import answers, pairs_corpus

ROWS = 75  # of 16 tokens in the corpus


@pytest.fixture
def raw(raw: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    corpus = write_corpus(tmp_path / "more", [[1] * 6] * 200, vocab_size=50)
    data = {"corpora": {"c": {"path": str(corpus)}}, "global_batch_size": 6, "micro_batch_size": 1}
    return {**raw, "run": {"dir": str(tmp_path / "run"), "steps": 25}, "data": {**raw["data"], **data}}


def recipe_of(raw: dict[str, Any], *settings: str) -> TrainConfig:
    return build_recipe(config.override(raw, list(settings)))


def test_the_numbers_of_a_run_are_products_of_its_recipe(raw: dict[str, Any], tmp_path: Path) -> None:
    derived = derive(recipe_of(raw), world_size=3)
    parameters = 2 * 50 * 8 + (4 * 8 * 8 + 3 * 8 * 16 + 2 * 8) + 8
    expected = {
        "parameters": parameters,
        "ranks": 3,
        "rows per rank and step": 2,
        "micro-batches per step": 2,
        "tokens per step": 96,
        "tokens in the run": 2400,
        "epochs of c": 2.0,
    }
    assert expected.items() <= derived.numbers.items()
    assert not (tmp_path / "run").exists(), "nothing was started"


def test_a_corpus_that_the_loss_cannot_learn_from_is_refused(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["data"]["corpora"]["c"]["path"] = str(pairs_corpus(tmp_path / "pairs", answers(9)))
    with pytest.raises(ConfigError, match=r"Corpus 'c' has rejected answers, and tune\.loss 'next_token'"):
        derive(recipe_of(raw, "data.packing=concat", "run.steps=1"), world_size=1)


def test_a_corpus_without_a_teacher_is_refused(raw: dict[str, Any]) -> None:
    recipe = recipe_of(raw)
    distilled = replace(recipe, tune=TuneConfig(loss="distillation"))
    with pytest.raises(ConfigError, match=r"needs a teacher's tokens for corpus 'c'"):
        derive(distilled, world_size=1)


def test_what_is_shown_can_be_given_back_as_settings(raw: dict[str, Any]) -> None:
    recipe = recipe_of(raw, "validate.every=5", "data.holdout=0.2", "optim.clip_norm=inf")
    text = derive(recipe, world_size=1).as_text()
    again = config.build(TrainConfig, config.override({}, text.split("\n\n")[0].splitlines()))
    assert again == recipe
    assert "validation rows: " in text


def test_the_json_holds_the_whole_recipe(raw: dict[str, Any]) -> None:
    recipe = recipe_of(raw)
    assert config.build(TrainConfig, derive(recipe, world_size=1).as_json()["recipe"]) == recipe


@pytest.mark.parametrize(("world_size", "rows"), [(1, 6), (2, 3), (6, 1)])
def test_without_a_micro_batch_size_a_rank_takes_its_share_at_once(
    raw: dict[str, Any], world_size: int, rows: int
) -> None:
    del raw["data"]["micro_batch_size"]
    assert check_rows(recipe_of(raw), world_size=world_size) == rows


def test_a_micro_batch_that_does_not_divide_a_ranks_rows_is_refused(raw: dict[str, Any]) -> None:
    recipe = recipe_of(raw, "data.micro_batch_size=2")
    assert check_rows(recipe, world_size=1) == 2
    message = r"micro_batch_size 2 does not divide a rank's 3 rows\. Choose a divisor"
    with pytest.raises(ConfigError, match=message):
        derive(recipe, world_size=2)


@pytest.mark.parametrize("world_size", [0, -1])
def test_no_ranks_are_refused(raw: dict[str, Any], world_size: int) -> None:
    with pytest.raises(ConfigError, match=rf"number of ranks must be at least 1 \(got {world_size}\)"):
        derive(recipe_of(raw), world_size=world_size)


def test_a_capped_corpus_that_suffices_to_the_last_sample_is_accepted_and_one_step_more_is_not(
    raw: dict[str, Any],
) -> None:
    raw["data"] |= {"global_batch_size": 5}
    capped = ("data.corpora.c.epochs=2",)
    steps = 2 * ROWS // 5
    derive(recipe_of(raw, *capped, f"run.steps={steps}"), world_size=1)
    message = rf"needs {5 * (steps + 1)} sequences, .* 'c' reaches .* its 2 epochs at step {steps}\. L"
    with pytest.raises(ConfigError, match=message):
        derive(recipe_of(raw, *capped, f"run.steps={steps + 1}"), world_size=1)


def test_what_whole_packing_leaves_out_is_said_before_the_run(raw: dict[str, Any], tmp_path: Path) -> None:
    write_corpus(tmp_path / "chats", [[1] * 6] * 190 + [[2] * 20] * 10, vocab_size=50)
    told = [f"data.corpora.c.path={tmp_path / 'chats'}", "data.packing=whole", "data.overlong=drop"]
    numbers = derive(recipe_of(raw, *told), world_size=1).numbers
    assert numbers["epochs of c"] == round(150 / 95, 3), "two documents of six tokens a row of 16"
    assert numbers["left out of c"] == "200 tokens of 10 documents"
    assert numbers["padding of c"] == 150 * 4


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"pipeline": 4}, r"needs at least 4 micro-batches of a rank's rows \(got 3\)\. Adjust data"),
        ({"pipeline": 2, "stages_per_rank": 2}, r"needs a multiple of 2 micro-batches .* \(got 3\)"),
    ],
)
def test_pipelines_that_cannot_flow_are_refused(
    raw: dict[str, Any], parallel: dict[str, int], said: str
) -> None:
    raw["parallel"] = parallel
    raw["model"] |= {"num_hidden_layers": 4}
    raw["data"] |= {"micro_batch_size": 2}
    recipe = build_recipe(raw)
    with pytest.raises(ConfigError, match=said):
        derive(recipe, world_size=parallel["pipeline"])


def test_a_checkpoint_of_adapters_has_the_bytes_of_their_numbers(raw: dict[str, Any]) -> None:
    recipe = recipe_of(raw)
    run = replace(recipe.run, start_from="base")
    tuned = replace(recipe, run=run, tune=TuneConfig(method="lora", rank=2, layers=("query",)))
    shape = recipe.model.linear_layers["layers.0.attention.query"]
    numbers = 2 * sum(shape) * recipe.model.num_hidden_layers
    assert derive(tuned, world_size=1).numbers["checkpoint"] == mib(numbers * 12)
