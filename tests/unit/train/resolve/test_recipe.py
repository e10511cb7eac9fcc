"""Recipes from files: what is laid over them, and what follows from the data."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.core import config
from penstock.core.errors import ConfigError
from penstock.testing.corpora import write_corpus
from penstock.train.recipe.config import TrainConfig
from penstock.train.resolve.load import build_recipe, load_recipe


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
        + "".join(f"{name} = {value}\n" for name, value in raw["model"].items())
        + f'[data]\nsequence_length = 16\nglobal_batch_size = 4\n[data.corpora.c]\npath = "{corpus}"\n'
    )
    recipe = load_recipe(path, ["run.dir=b", "optim.learning_rate=1", "data.corpora.c.epochs=2"])
    assert (recipe.run.dir, recipe.run.steps) == ("b", 5)
    assert recipe.optim.learning_rate == 1.0
    assert recipe.data.epochs == {"c": 2}


@pytest.mark.parametrize("section", ["run", "model", "data"])
def test_a_section_that_is_missing_is_named(raw: dict[str, Any], section: str) -> None:
    del raw[section]
    with pytest.raises(ConfigError, match=f"Missing key {section}"):
        build_recipe(raw)
