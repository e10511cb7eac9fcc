"""`penstock recipes check`: size and memory of a recipe, without its corpora and without allocating it."""

import argparse
import json
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.cli.options import add_recipe_settings, recipe_settings
from penstock.core import config as configs
from penstock.core.config import Raw
from penstock.core.errors import ConfigError
from penstock.core.files import MANIFEST_FILE
from penstock.core.units import mib, si
from penstock.data.corpus.columns import learned_share
from penstock.data.corpus.manifest import load_manifest
from penstock.train.planning.devices import RecipePlan, plan_recipe
from penstock.train.resolve.load import recipe_names, recipe_text, with_settings

EPILOG = """\
The model is built on the meta device: its shapes are real, its numbers take no memory. The memory of a device
is that of `penstock train RECIPE --dry-run`, which opens the corpora too, at the peak of a step: persistent
state (weights, gradients, optimizer), activations kept for the backward pass, and working memory: gathered
parameters, the loss, temporaries and buffers. Without --devices, the usual numbers are shown that layout and
batch allow.

example:
  penstock recipes check
  penstock recipes check llama3-70b --devices 64 --devices 256
  penstock recipes check mine.toml --set optim.rule=adamw_8bit --json

exit codes: 0 valid, 2 invalid recipe or usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "recipes", nargs="*", metavar="RECIPE", help="names or TOML files; default: all shipped"
    )
    parser.add_argument(
        "--devices",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="number of devices; may be repeated",
    )
    add_recipe_settings(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Check every recipe; stops at the first invalid one."""
    found = {}
    for name in arguments.recipes or recipe_names():
        raw = with_settings(_raw(name), recipe_settings(arguments))
        try:
            plan = plan_recipe(raw, devices=arguments.devices)
        except ConfigError as error:
            raise ConfigError(f"Recipe {name}: {str(error).removesuffix('.')}") from None
        _build(plan)
        found[name] = plan
    if arguments.json:
        print(json.dumps({name: _as_json(plan) for name, plan in found.items()}))
    else:
        print("\n\n".join("\n".join(_as_text(name, plan)) for name, plan in found.items()))
    return 0


def _raw(name: str) -> Raw:
    if name.endswith(".toml"):
        return configs.load_toml(Path(name))
    return tomllib.loads(recipe_text(name))


def _build(plan: RecipePlan) -> None:
    """Build the model, and assert that it has the planned number of parameters."""
    from penstock.models import FAMILIES  # imports torch, not needed for --help
    from penstock.nn.unfilled import unfilled

    config = plan.config.model
    with unfilled():
        model = FAMILIES[config.model_type](config)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert built == config.num_parameters, (built, config)


def _learned(plan: RecipePlan) -> dict[str, str]:
    """Return how many tokens are learned of each corpus of conversations that is on this machine."""
    found = {}
    for name, path in plan.config.data.paths.items():
        if (Path(path) / MANIFEST_FILE).is_file() and (learned := learned_share(load_manifest(Path(path)))):
            found[name] = learned
    return found


def _as_json(plan: RecipePlan) -> dict[str, Any]:  # Any: what JSON can write
    return {
        "parameters": plan.config.model.num_parameters,
        "tokens_per_step": plan.tokens_per_step,
        "tokens": plan.tokens,
        "assumed": plan.assumed,
        "learned_tokens": _learned(plan),
        "devices": [
            {**asdict(share), "memory": {**asdict(share.memory), "total": share.memory.total}}
            for share in plan.shares
        ],
        "recipe": configs.dump(plan.config),
    }


def _length(plan: RecipePlan) -> str:
    """Return the length of a run in words."""
    run = plan.config.run
    if not run.steps:
        return f"{run.epochs:g} epochs of corpora that are not here, so their steps are unknown"
    return f"{si(plan.tokens)} in {run.steps:,} steps" + (f", {run.epochs:g} epochs" if run.epochs else "")


def _as_text(name: str, plan: RecipePlan) -> Iterator[str]:
    config = plan.config
    yield (
        f"{name}: {config.model.num_parameters:,} parameters, {si(plan.tokens_per_step)} tokens a step, "
        f"{_length(plan)}"
    )
    for corpus, learned in _learned(plan).items():
        yield f"  learned of {corpus}: {learned}"
    for key, value in plan.assumed.items():
        if key == "preset":
            yield f"  run.start_from {config.run.start_from} is not there: the shape of {value} assumed"
        else:
            yield f"  model.{key} follows from the corpora: {value:,} assumed"
    width = max([len(share.layout) for share in plan.shares] + [6])
    titles = ("weights", "gradients", "optimizer", "activations", "at work", "all")
    yield f"  devices  {'layout':<{width}}  rows  a pass" + "".join(f"  {title:>11}" for title in titles)
    for share in plan.shares:
        memory = share.memory
        at_work = memory.gathered + memory.working + memory.loss + memory.buffers
        parts = (
            memory.weights,
            memory.gradients,
            memory.optimizer,
            memory.activations,
            at_work,
            memory.total,
        )
        sizes = "".join(f"  {mib(size):>11}" for size in parts)
        yield f"  {share.devices:>7}  {share.layout:<{width}}  {share.rows:>4}  {share.micro_rows:>6}{sizes}"
