"""The warning of a learning rate that a resumed run raises."""

import logging

import pytest

from penstock.core.config import build
from penstock.train.recipe.config import TrainConfig
from penstock.train.run import KeptRecipe, _say_raised_rate

MODEL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize(
    ("now", "changes", "said"),
    [
        ({"run.steps": 90}, {"run.steps": (9, 90)}, ["run.steps is 90, and was 9."]),
        (
            {"run.steps": 10, "optim.learning_rate": 0.5},
            {"optim.learning_rate": (0.001, 0.5), "data.holdout": (0, 0.1)},
            ["optim.learning_rate is 0.5, and was 0.001."],
        ),
        (
            {"run.steps": 20, "schedule.rule": "constant"},
            {"run.steps": (10, 20), "schedule.rule": ("cosine", "constant")},
            ["run.steps is 20, and was 10; ", "schedule.rule is constant, and was cosine."],
        ),
    ],
)
def test_the_warning_names_the_settings_that_raise_the_rate(now, changes, said, caplog):
    raw = {
        "run": {"dir": "x"},
        "model": MODEL,
        "data": {"sequence_length": 8, "global_batch_size": 2, "corpora": {"c": {"path": "c"}}},
    }
    for name, value in now.items():
        section, key = name.split(".")
        raw.setdefault(section, {})[key] = value
    with caplog.at_level(logging.WARNING):
        _say_raised_rate(build(TrainConfig, raw), KeptRecipe(file="recipe.json", changes=changes), step=8)
    (message,) = caplog.messages
    assert all(text.replace('"', "") in message.replace('"', "") for text in said), message
    assert "schedule is that of" not in message
