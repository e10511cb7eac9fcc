"""Recipes: defaults that follow from the data, and every value that is refused (the rest: tests/e2e)."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.core import config
from penstock.core.errors import ConfigError, UsageError
from penstock.testing.corpora import write_corpus
from penstock.train.config import TrainConfig, build_recipe, load_recipe

MODEL = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    """Plain values of a recipe over one corpus of 50 token ids."""
    corpus = write_corpus(tmp_path / "c", [[1, 2, 3]] * 40, vocab_size=50)
    return {
        "run": {"dir": "runs/x", "steps": 10},
        "model": dict(MODEL),
        "data": {
            "corpora": {"c": {"path": str(corpus)}},
            "sequence_length": 16,
            "global_batch_size": 4,
        },
    }


def test_vocabulary_and_context_follow_from_the_data(raw: dict[str, Any]) -> None:
    recipe = build_recipe(raw)
    assert recipe.model.vocab_size == 50
    assert recipe.model.max_position_embeddings == 16


def test_vocabulary_and_context_may_be_larger_than_the_data_needs(raw: dict[str, Any]) -> None:
    raw["model"] |= {"vocab_size": 64, "max_position_embeddings": 128}
    recipe = build_recipe(raw)
    assert recipe.model.vocab_size == 64
    assert recipe.model.max_position_embeddings == 128


def test_the_vocabulary_is_that_of_the_largest_corpus(raw: dict[str, Any], tmp_path: Path) -> None:
    wide = write_corpus(tmp_path / "wide", [[1, 2, 3]], vocab_size=70_000)
    raw["data"]["corpora"]["wide"] = {"path": str(wide)}
    assert build_recipe(raw).model.vocab_size == 70_000
    raw["model"]["vocab_size"] = 60
    with pytest.raises(ConfigError, match=r"Corpus 'wide' has token ids up to 69999, .* at least 70000"):
        build_recipe(raw)


def test_a_preset_is_written_out_under_the_keys_beside_it(raw: dict[str, Any]) -> None:
    raw["model"] = {"preset": "llama3-8b", "num_hidden_layers": 2}
    model = build_recipe(raw).model
    assert (model.hidden_size, model.num_hidden_layers) == (4096, 2)
    assert (model.vocab_size, model.max_position_embeddings) == (128_256, 8192)
    raw["model"]["vocab_size"] = 40
    with pytest.raises(ConfigError, match=r"Corpus 'c' has token ids up to 49, model.vocab_size is 40"):
        build_recipe(raw)


def test_a_recipe_dumped_as_json_builds_an_equal_one(raw: dict[str, Any]) -> None:
    raw["data"]["corpora"]["c"] |= {"weight": 2, "epochs": 3}
    raw |= {
        "schedule": {"rule": "wsd", "warmup_steps": 2, "decay_steps": 3},
        "data": {**raw["data"], "holdout": 0.1, "micro_batch_size": 2},
        "validate": {"every": 5},
        "compute": "float32",
    }
    recipe = build_recipe(raw)
    again = json.loads(json.dumps(config.dump(recipe)))
    assert config.build(TrainConfig, again) == recipe
    assert build_recipe(again) == recipe


def test_overrides_are_laid_over_the_file(raw: dict[str, Any], tmp_path: Path) -> None:
    corpus = raw["data"]["corpora"]["c"]["path"]
    path = tmp_path / "r.toml"
    path.write_text(
        '[run]\ndir = "a"\nsteps = 5\n[model]\n'
        + "".join(f"{name} = {value}\n" for name, value in MODEL.items())
        + f'[data]\nsequence_length = 16\nglobal_batch_size = 4\n[data.corpora.c]\npath = "{corpus}"\n'
    )
    recipe = load_recipe(path, ["run.dir=b", "optim.learning_rate=1", "data.corpora.c.epochs=2"])
    assert (recipe.run.dir, recipe.run.steps) == ("b", 5)
    assert recipe.optim.learning_rate == 1.0
    assert recipe.data.epochs == {"c": 2}


def test_weights_are_of_all_corpora_or_of_none(raw: dict[str, Any]) -> None:
    path = raw["data"]["corpora"]["c"]["path"]
    assert build_recipe(raw).data.weights is None
    raw["data"]["corpora"] = {"a": {"path": path, "weight": 0.5}, "b": {"path": path, "weight": 1}}
    assert build_recipe(raw).data.weights == {"a": 0.5, "b": 1.0}
    del raw["data"]["corpora"]["a"]["weight"]
    with pytest.raises(ConfigError, match=r"Some corpora have a weight and some have none\. Give all"):
        build_recipe(raw)


INF = float("inf")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.corpora={}", r"data\.corpora is empty\. Add \[data\.corpora\.NAME\]"),
        ("data.sequence_length=1", r"data\.sequence_length must be at least 2 \(got 1\)"),
        ("data.global_batch_size=0", r"data\.global_batch_size must be at least 1 \(got 0\)"),
        ("data.micro_batch_size=0", r"data\.micro_batch_size must be at least 1 \(got 0\)"),
        ("data.micro_batch_size=-2", r"data\.micro_batch_size must be at least 1 \(got -2\)"),
        ("data.num_workers=-1", r"data\.num_workers must be at least 0 \(got -1\)"),
        ("data.prefetch=-1", r"data\.prefetch must be at least 0 \(got -1\)"),
        ("optim.learning_rate=0", r"optim\.learning_rate must be a number above 0 \(got 0\.0\)"),
        ("optim.learning_rate=nan", r"optim\.learning_rate must be a finite number \(got nan\)"),
        ("optim.learning_rate=inf", r"optim\.learning_rate must be a finite number \(got inf\)"),
        ("optim.clip_norm=-1", r"optim\.clip_norm must be above 0; inf: never clip \(got -1\.0\)"),
        ("optim.clip_norm=nan", r"optim\.clip_norm must be a number \(got nan\)"),
        ("optim.eps=0", r"optim\.eps must be a number above 0 \(got 0\.0\)"),
        ("optim.weight_decay=-0.1", r"optim\.weight_decay must be a number, zero or more \(got -0\.1\)"),
        ("optim.weight_decay=nan", r"optim\.weight_decay must be a finite number \(got nan\)"),
        ("optim.beta1=1", r"optim\.beta1 must be in \[0, 1\) \(got 1\.0\)"),
        ("optim.beta2=-0.1", r"optim\.beta2 must be in \[0, 1\) \(got -0\.1\)"),
        ("schedule.warmup_steps=-1", r"schedule\.warmup_steps must be at least 0 \(got -1\)"),
        ("schedule.decay_steps=-1", r"schedule\.decay_steps must be at least 0 \(got -1\)"),
        ("schedule.warmup_steps=11", r"warmup_steps and decay_steps exceed run\.steps \(got 10\)"),
        ("schedule.final_share=-0.1", r"schedule\.final_share must be between 0 and 1 \(got -0\.1\)"),
        ("schedule.final_share=1.5", r"schedule\.final_share must be between 0 and 1 \(got 1\.5\)"),
        ("validate.every=-1", r"validate\.every must be at least 0 \(got -1\)"),
        ("validate.samples=0", r"validate\.samples must be at least 1 \(got 0\)"),
        ("checkpoint.every=0", r"checkpoint\.every must be at least 1 \(got 0\)"),
        ("checkpoint.keep=0", r"checkpoint\.keep must be at least 1 \(got 0\)"),
        ("compute=float16", r"compute has no such choice \(got 'float16'\)\. Did you mean 'bfloat16'"),
        ("model.hidden_size=-8", r"hidden_size must be positive \(got -8\)"),
        ("model=3", r"model must be a section \(got 3\)"),
        ("data=5", r"data must be a section \(got 5\)\. Write its keys under \[data\]"),
        ("run=5", r"run must be a section \(got 5\)"),
        ("data.corpora=5", r"data\.corpora must be a table of sections \(got 5\)"),
        ("run.dir=", r"run\.dir is empty \(got ''\)"),
        ("run.dir=123", r"run\.dir must be text \(got 123\)\. Write it in quotes"),
        ("run.steps=100000000000000000000", r"run\.steps must be from -2\*\*62 to 2\*\*62"),
        ("model.rope_theta=nan", r"model\.rope_theta must be a finite number \(got nan\)"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_key(
    raw: dict[str, Any], setting: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        build_recipe(config.override(raw, [setting]))


def test_a_layout_that_the_model_cannot_be_cut_by_is_refused_before_anything_starts(
    raw: dict[str, Any],
) -> None:
    raw["parallel"] = {"tensor": 4}
    with pytest.raises(ConfigError, match=r"does not divide model.num_attention_heads 2 \(got 4\)"):
        build_recipe(raw)


def test_a_gradient_that_is_never_clipped_is_a_choice(raw: dict[str, Any]) -> None:
    assert build_recipe(config.override(raw, ["optim.clip_norm=inf"])).optim.clip_norm == INF


@pytest.mark.parametrize("section", ["run", "model", "data"])
def test_a_section_that_is_missing_is_named(raw: dict[str, Any], section: str) -> None:
    del raw[section]
    with pytest.raises(ConfigError, match=f"Missing key {section}"):
        build_recipe(raw)
