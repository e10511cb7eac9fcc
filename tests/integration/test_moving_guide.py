"""The page for users of axolotl and TRL: its recipe is one, its script is TRL's, and no key lacks its row."""

import ast
import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from peft import LoraConfig

from penstock.train.planning.devices import plan_recipe
from penstock.train.recipe.config import TrainConfig

TEXT = (Path(__file__).parents[2] / "docs" / "how-to" / "move-from-axolotl-and-trl.md").read_text()
ROWS = [line.strip("|").split(" | ") for line in TEXT.splitlines() if line.startswith("| ")]
SECTIONS = "run|tune|data|optim|schedule|precision|parallel|recompute|compile|validate|checkpoint|measure"


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    assert found
    return found[1]


def keys_in(column: int) -> set[str]:
    """Return the names in backticks in a column of the tables."""
    return {name for row in ROWS for name in re.findall(r"`(\w+)`", row[column])}


def keys_of(values: Any) -> set[str]:  # Any: YAML values
    if isinstance(values, list):
        return set[str]().union(*map(keys_of, values))
    return {*values, *keys_of(list(values.values()))} if isinstance(values, dict) else set()


def recipe_keys(kind: Any = TrainConfig, prefix: str = "") -> set[str]:  # Any: a class
    found = set()
    for name, hint in get_type_hints(kind).items():
        found.add(f"{prefix}{name}")
        for section in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(section):
                found |= recipe_keys(section, f"{prefix}{name}.")
    return found


def test_the_recipe_is_one_and_says_what_the_others_say() -> None:
    config = plan_recipe(tomllib.loads(block("toml")), devices=[1]).config
    axolotl = yaml.safe_load(block("yaml"))
    assert config.run.epochs == axolotl["num_epochs"]
    assert config.data.packing == "whole"
    per_step = axolotl["micro_batch_size"] * axolotl["gradient_accumulation_steps"]
    assert config.data.global_batch_size == per_step
    assert config.optim.learning_rate == float(axolotl["learning_rate"])
    assert config.schedule.warmup_ratio == axolotl["warmup_ratio"]


def test_every_key_of_the_recipe_of_axolotl_has_a_row() -> None:
    assert keys_of(yaml.safe_load(block("yaml"))) <= keys_in(0)


def test_every_argument_of_the_script_is_one_of_trl_and_has_a_row() -> None:
    from trl import SFTConfig  # dear: here only the worker that runs this file imports it

    calls = [node for node in ast.walk(ast.parse(block("python"))) if isinstance(node, ast.Call)]
    named = {
        node.func.id: {word.arg for word in node.keywords}
        for node in calls
        if isinstance(node.func, ast.Name)
    }
    for kind in (SFTConfig, LoraConfig):
        assert named[kind.__name__] <= {field.name for field in dataclasses.fields(kind)}, kind
    assert set[str | None]().union(*named.values()) - {"args", "split"} <= keys_in(1)


def test_every_key_of_a_recipe_that_is_named_exists() -> None:
    named = {key for row in ROWS for key in re.findall(rf"`((?:{SECTIONS})\.[a-z_0-9.]+)", row[-1])}
    assert len(named) > 30
    assert named <= recipe_keys() | {"data.corpora."}
