"""Find the fastest way to train a model on a cluster, with predicted time and memory.

example:
  penstock plan --model llama3-8b --cluster vela --tokens 1T
  penstock plan --model mine.toml --cluster cluster.toml --set parallel.pipeline=1 --out planned.toml
  penstock plan --model llama3-70b --cluster h100-ethernet --explain timeline
  penstock plan --model llama3-70b --cluster vela --inference

A cluster is a file, or the name of one that comes with Penstock; `penstock doctor` writes one for the
machines it runs on. A model is a preset's name or a recipe, whose own keys stay fixed; its vocabulary follows
from its corpora, where they can be read. Predictions have an error band; docs/explanation/planner.md has
their basis and their accuracy.

exit codes: 0 done, 2 wrong usage, or nothing fits
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from penstock.cli.options import add_fields, add_recipe_settings, options_of, recipe_settings
from penstock.cli.streams import warn
from penstock.core import config as configs
from penstock.core.config import Raw
from penstock.core.errors import PenstockError, UsageError
from penstock.core.files import check_folder_of, write_atomic
from penstock.core.toml import toml_text
from penstock.core.units import Count, si
from penstock.engine.config import EngineConfig
from penstock.engine.model_runner.graph_plan import plan_graphs
from penstock.models.decoder.config import DecoderConfig
from penstock.models.presets import PRESETS
from penstock.plan import decode
from penstock.plan.hardware import Cluster, cluster_names, cluster_of
from penstock.plan.predict import timeline_of
from penstock.plan.report import PlanReport, described, svg, trace
from penstock.plan.search import HEADROOM, Option, search, what_would_help
from penstock.train.planning.devices import config_of
from penstock.train.planning.question import in_numbers, question_of, recipe_for_preset, recipe_of
from penstock.train.recipe.config import TrainConfig
from penstock.train.resolve.load import build_recipe, with_settings

_TOKENS_PER_STEP = 4 * 2**20
_LENGTH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of a plan besides recipe keys."""

    model: Annotated[str, "PRESET|RECIPE.toml"]
    """What to train."""
    cluster: Annotated[str, "NAME|FILE.toml"]
    """Where: a file, or one of those that come with Penstock"""
    tokens: Count | None = None
    """Tokens to train on, such as 1T."""
    rows: int | None = None
    """Rows of a step, for a preset. None: about 4M tokens."""
    length: int | None = None
    """Tokens of a row, for a preset. None: 4096."""
    headroom: Annotated[float, "SHARE"] = HEADROOM
    """Share of a device's memory that plans leave free."""
    compress: bool = False
    """Allow weights and gradients in int8 on the wire where the network limits; changes the numbers."""
    out: Annotated[Path | None, "FILE.toml"] = None
    """Write the plan as a recipe."""
    explain: Annotated[Path | None, "FOLDER"] = None
    """Draw a step: timeline.svg, and timeline.json for Perfetto."""
    inference: bool = False
    """Predict the speed of generation instead, token by token."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        if not 0 <= self.headroom < 1:
            raise UsageError("--headroom must be from 0 to below 1", got=self.headroom)
        for option, value in (("--rows", self.rows), ("--length", self.length)):
            if value is not None and value < 1:
                raise UsageError(f"{option} must be at least 1", got=value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    names = ", ".join(cluster_names())
    add_fields(
        parser,
        PlanOptions,
        *("model", "cluster", "tokens", "rows", "length"),
        more={"cluster": f": {names}"},
    )
    add_recipe_settings(parser)
    add_fields(parser, PlanOptions, "headroom", "compress", "out", "explain", "inference", "json")


def run(arguments: argparse.Namespace) -> int:
    """Plan, and print the result."""
    options = options_of(arguments, PlanOptions)
    if options.out:
        check_folder_of(options.out, option="--out")
    cluster = cluster_of(options.cluster)
    raw = with_settings(_raw(options, cluster), recipe_settings(arguments))
    config = _config_of(raw)
    if options.inference:
        return _generation(config.model, cluster, tokens=config.data.sequence_length, as_json=options.json)
    raw = in_numbers(raw, config, world_size=cluster.num_devices, ranks_per_machine=cluster.devices_per_node)
    numbered = replace(config_of(raw)[0], model=config.model)
    question = question_of(numbered, raw, may_compress=options.compress)
    found = search(question, cluster, headroom=options.headroom)
    job = found.best.job
    tokens = options.tokens or config.run.steps * question.global_batch_size * question.step.sequence_length
    report = PlanReport(
        question=question,
        cluster=cluster,
        found=found,
        helps=what_would_help(job, cluster),
        tokens=tokens if options.tokens or options.model.endswith(".toml") else 0,
        steps=config.run.steps,
        epochs=config.run.epochs if config.run.steps and not options.tokens else None,
    )
    print(json.dumps(report.as_json(), indent=1) if options.json else report.as_text())
    if options.out:
        _write_recipe(options.out, raw, found.best, cluster)
    if options.explain:
        _explain(options.explain, found.best, cluster)
    return 0


def _config_of(raw: Raw) -> TrainConfig:
    """Build a recipe as `penstock train` does; if a corpus cannot be read, the vocabulary is assumed."""
    config, assumed = config_of(raw)
    if "preset" in assumed:
        told = (
            f"run.start_from {config.run.start_from} is not there: the shape of {assumed['preset']} assumed"
        )
        warn(f"{told}.")
    if "vocab_size" not in assumed:
        return config
    try:
        return build_recipe(raw)
    except PenstockError as error:
        said = f"model.vocab_size follows from the corpora: {assumed['vocab_size']:,} assumed. {error}"
        warn(said)
        return config


def _generation(model: DecoderConfig, cluster: Cluster, *, tokens: int, as_json: bool) -> int:
    """Print the predicted speed of generation with `tokens` tokens of context."""
    found = decode.serving_options(model, cluster, context_tokens=tokens)
    defaults = EngineConfig()
    graphs = plan_graphs(
        model, max_sequences=defaults.max_sequences, context=tokens, block_size=defaults.block_size
    )
    if as_json:
        options = decode.as_json(found, cluster.device)
        for option in options:  # of one rank only
            option["graphs"] = graphs.as_json() if option["tensor"] == 1 else None
        print(json.dumps(options, indent=1))
        return 0
    size, device = si(model.num_parameters), cluster.device.name
    print(f"{size} parameters in bfloat16, {tokens:,} tokens of context, {device}")
    print("\n".join(decode.as_lines(found)))
    print(f"Within {found[0].prediction.band:.0%}. {decode.basis(found, cluster.device)}")
    print("\n".join(graphs.as_lines()))
    print("  on NVIDIA GPUs, with tensor degree 1")
    return 0


def _raw(options: PlanOptions, cluster: Cluster) -> Raw:
    """Return the values of a recipe, or of one made for a preset."""
    name = options.model
    if name.endswith(".toml"):
        if options.rows is not None or options.length is not None:
            raise UsageError(
                "--rows and --length are for presets; a recipe has its own",
                fix="Use --set data.global_batch_size=N and --set data.sequence_length=N.",
            )
        return configs.load_toml(Path(name))
    devices, context = cluster.num_devices, PRESETS.get(name, {}).get("max_position_embeddings", _LENGTH)
    length = options.length or min(_LENGTH, context)
    rows = options.rows or max(1, round(_TOKENS_PER_STEP / length / devices)) * devices
    return recipe_for_preset(name, tokens=options.tokens or 0, rows=rows, length=length)


def _write_recipe(path: Path, raw: Raw, option: Option, cluster: Cluster) -> None:
    name = cluster.name or f"{cluster.nodes} machines"
    head = (
        f"# Planned for {name}, {cluster.num_devices} x {cluster.device.name}: {described(option)}.\n"
        f"# Predicted: {option.speed:,.0f} tokens/s/device, within {option.prediction.band:.0%}.\n"
    )
    write_atomic(path, f"{head}{toml_text(recipe_of(raw, option))}\n")


def _explain(folder: Path, option: Option, cluster: Cluster) -> None:
    events = timeline_of(option.job, cluster, memory_bytes=option.memory.total, record=True).events
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "timeline.svg", svg(events, title=f"A step of {described(option)}"))
    write_atomic(folder / "timeline.json", json.dumps(trace(events)))
