"""The recipes that docs/how-to/change-the-mixture.md shows are recipes, and its policy is one."""

import re
import tomllib
from pathlib import Path

from penstock.core import config
from penstock.data.schedule.adaptive import thousandths
from penstock.testing.corpora import numbered_corpus
from penstock.train.recipe.data_config import AdaptiveConfig, DataConfig
from penstock.train.recipe.planned_changes import plan

TEXT = (Path(__file__).parents[3] / "docs" / "how-to" / "change-the-mixture.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_every_recipe_in_the_text_is_accepted():
    for block in blocks("toml"):
        raw = tomllib.loads(block)["data"]
        names = {name for entry in raw.get("schedule", ()) for name in entry.get("weights", {})} or {
            "web",
            "code",
        }
        whole = {
            "corpora": {name: {"path": name} for name in names},
            "sequence_length": 4096,
            "global_batch_size": 1024,
            **raw,
        }
        data = config.build(DataConfig, whole, where="data")
        assert plan(data) or data.is_adaptive, block


def test_the_loop_in_the_text_runs(tmp_path):
    for name in ("web", "code", "math"):
        numbered_corpus(tmp_path / name, [30] * 40)
    space = {"folder": tmp_path}
    for block in blocks("python")[1:]:
        exec(block, space)


def test_the_policy_in_the_text_decides():
    space = {"thousandths": thousandths}
    exec(blocks("python")[0], space)
    assert space["Fair"]().decide({"a": 3.0, "b": 1.0}, {"a": 0.5, "b": 0.5}) == {"a": 0.75, "b": 0.25}
    assert AdaptiveConfig().policy == "none"
