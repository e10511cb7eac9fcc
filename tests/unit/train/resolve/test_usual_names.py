"""What other trainers call an option leads to the key of the recipe."""

import pytest

from penstock.core.errors import ConfigError
from penstock.train.planning.devices import config_of
from penstock.train.resolve.load import build_recipe
from penstock.train.resolve.usual_names import NAMES, _keys, keys_for


def test_every_key_that_a_name_leads_to_is_one_of_a_recipe() -> None:
    known = {*_keys(), "data.corpora.NAME.path"}
    assert set(NAMES) <= known


def test_no_name_is_a_key_of_the_section_it_leads_to() -> None:
    keys = set(_keys())
    for key, names in NAMES.items():
        section = key.rpartition(".")[0]
        assert not {f"{section}.{name}" for name in names.split()} & keys, key


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("optim.peak_lr", ["optim.learning_rate"]),
        ("lr", ["optim.learning_rate"]),
        ("run.max_iters", ["run.steps"]),
        ("data.seq_len", ["data.sequence_length"]),
        ("train.gradient_accumulation_steps", ["data.micro_batch_size"]),
        ("data.batch_size", ["data.global_batch_size", "data.micro_batch_size"]),
        ("epochs", ["run.epochs"]),
        ("train.num_train_epochs", ["run.epochs"]),
        ("model.n_layer", ["model.num_hidden_layers"]),
        ("parallel.tp", ["parallel.tensor"]),
        ("optim.optimizer", ["optim.rule"]),
        ("run.sequence_length", ["data.sequence_length"]),
        ("optim.lernin_rate", []),
    ],
)
def test_a_usual_name_leads_to_the_keys_of_a_recipe(key: str, known: list[str]) -> None:
    assert keys_for(key) == known


@pytest.mark.parametrize("build", [build_recipe, config_of])
def test_a_recipe_with_a_usual_name_is_refused_with_the_key(build: object) -> None:
    raw = {
        "run": {"dir": "r", "steps": 1},
        "model": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
        "data": {
            "sequence_length": 8,
            "global_batch_size": 1,
            "corpora": {"s": {"path": "synthetic:tokens=1e6,mean_document=9"}},
        },
        "optim": {"max_grad_norm": 1.0},
    }
    assert callable(build)
    with pytest.raises(ConfigError, match=r"key optim.max_grad_norm. Did you mean 'optim.clip_norm'\?"):
        build(raw)
