"""Resolved summary of a recipe: sizes, FLOPs and memory before the run; imports no torch."""

import math
from dataclasses import dataclass
from typing import Any

from penstock.core import config as configs
from penstock.core.toml import flat, toml_text
from penstock.core.units import mib, plural, si
from penstock.data import Loader
from penstock.data.corpus.columns import learned_share
from penstock.data.packing import PADDING_RULES
from penstock.data.schedule.adaptive import thousandths
from penstock.nn.linear.adapter_config import OUTPUT_MATRIX
from penstock.parallel.layout import layout_of
from penstock.train.data_setup import (
    check_data,
    continue_from_newest,
    heldout_rows,
    train_loader,
)
from penstock.train.islands.schedule import bytes_per_step
from penstock.train.optim.learning_rate import shortened
from penstock.train.planning.memory import memory_plan
from penstock.train.recipe.config import TrainConfig, on_machines, weight_bytes_per_parameter
from penstock.train.recipe.optim_config import optimizer_bytes_per_parameter
from penstock.train.recipe.outer_config import outer_bytes_per_parameter
from penstock.train.recipe.planned_changes import check_rows, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A resolved recipe with its derived numbers."""

    recipe: dict[str, Any]
    numbers: dict[str, int | float | str]
    changes: list[str]
    """A shortened schedule and planned changes, in words."""

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {"recipe": self.recipe, "derived": self.numbers, "changes": self.changes}

    def as_text(self) -> str:
        """Return everything as text, the recipe in the form of `--set`."""
        lines = [f"{path} = {_toml(value)}" for path, value in flat(self.recipe) if value is not None]
        lines += ["", "derived:", *(f"  {name}: {_shown(v)}" for name, v in self.numbers.items())]
        return "\n".join(
            [*lines, *(["", "changes:"] if self.changes else []), *map("  {}".format, self.changes)]
        )


def _learned_parameters(config: TrainConfig) -> int:
    """Return the number of parameters that a checkpoint holds: of a run with adapters theirs alone."""
    model, adapter = config.model, config.adapter
    if adapter is None:
        return model.num_parameters
    of_blocks = sum(
        own.num_parameters(*shape)
        for name, shape in model.linear_layers.items()
        if (own := adapter.of(name)) is not None
    )
    new_rows = adapter.new_rows * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    of_output = 0
    if (own := adapter.of(OUTPUT_MATRIX)) is not None:
        of_output = own.num_parameters(model.vocab_size, model.hidden_size)
    shapes = model.parameter_shapes
    whole = sum(math.prod(shape) for name, shape in shapes.items() if adapter.trains(name))
    return of_blocks + new_rows + of_output + whole


def derive(config: TrainConfig, *, world_size: int) -> Derived:
    """Compute the numbers of a run on one machine, opening its corpora.

    Raises:
        ConfigError: the recipe cannot run on that many ranks, or its corpora are too small.
    """
    config = on_machines(config, world_size=world_size, ranks_per_machine=world_size)
    data, model = config.data, config.model
    layout = layout_of(config.parallel, world_size=world_size)
    loader = train_loader(config, rank=0, world_size=layout.num_data, deliver="numpy")
    continue_from_newest(config, loader)
    check_data(config, loader)
    heldout = heldout_rows(config)
    local = data.global_batch_size // layout.num_data
    rows = check_rows(config, world_size=layout.num_data)
    tokens = data.global_batch_size * data.sequence_length
    parameters, in_all = model.num_parameters, loader.tokens_before(config.run.steps)
    flops = flops_of(config, loader)
    weights = config.precision.weights
    kept = weight_bytes_per_parameter(weights) + optimizer_bytes_per_parameter(config.optim)
    if config.outer.every:  # each island saves its own state
        kept = layout.replicate * kept + outer_bytes_per_parameter(config.outer)
    numbers: dict[str, int | float | str] = {
        "parameters": parameters,
        "ranks": world_size,
        "layout": str(layout),
        "rows per rank and step": local,
        "micro-batches per step": -(-local // rows),
        "tokens per step": tokens,
        "tokens in the run": in_all,
        "FLOP per token": model.flops_per_token(data.sequence_length),
        "FLOP in the run": flops,
        "checkpoint": mib(_learned_parameters(config) * kept),
        **memory_plan(config, layout).lines(),
    }
    numbers |= _of_corpora(config, loader)
    if config.outer.every:
        sent = bytes_per_step(config.outer, parameters=parameters, islands=layout.replicate)
        numbers["islands"], numbers["sent by an island per step"] = layout.replicate, mib(round(sent))
    if heldout is not None:
        numbers["validation rows"] = heldout.rows
    return Derived(recipe=configs.dump(config), numbers=numbers, changes=shown_changes(config))


def _of_corpora(config: TrainConfig, loader: Loader) -> dict[str, int | float | str]:
    """Return the numbers of a run that follow from its corpora, by name."""
    numbers: dict[str, int | float | str] = {}
    if config.run.epochs is not None:
        numbers["steps"] = config.run.steps
    for name, epochs in loader.epochs_by_corpus(config.run.steps).items():
        numbers[f"epochs of {name}"] = round(epochs, 3)
    for name, corpus in loader.corpora.items():
        if (learned := learned_share(corpus.manifest)) is not None:
            numbers[f"learned tokens of {name}"] = learned
    if config.data.packing in PADDING_RULES:
        for name, waste in loader.left_out_by_corpus(config.run.steps).items():
            numbers[f"left out of {name}"] = (
                f"{waste.left_out:,} tokens of {plural(waste.documents, 'document')}"
            )
        for name, padding in loader.padding_by_corpus(config.run.steps).items():
            numbers[f"padding of {name}"] = padding
    return numbers


def flops_of(config: TrainConfig, loader: Loader) -> int:
    """Return the FLOP of a run, each token at its sequence length."""
    steps, lengths = config.run.steps, [(0, config.data.sequence_length)]
    lengths += [(p.step, p.entry.sequence_length) for p in plan(config.data) if p.entry.sequence_length]
    ends = [min(step, steps) for step, _ in lengths[1:]] + [steps]
    total = 0
    for (start, length), end in zip(lengths, ends, strict=True):
        tokens = loader.tokens_before(end) - loader.tokens_before(min(start, steps))
        total += tokens * int(config.model.flops_per_token(length))
    return total


def shown_changes(config: TrainConfig) -> list[str]:
    """Return what differs from the recipe as written, in words: a shortened schedule, planned changes."""
    fitted = shortened(config.schedule, steps=config.run.steps)
    lines = [fitted] if fitted else []
    if config.schedule.warmup_ratio and not fitted:
        steps = config.schedule.fitted(config.run.steps).warmup_steps
        lines.append(f"Warm-up takes {steps:,} of the {config.run.steps:,} steps")
    for planned in plan(config.data):
        entry, said = planned.entry, []
        if entry.weights is not None:
            shares = ", ".join(f"{n} {w:.4g}" for n, w in thousandths(entry.weights).items())
            late = planned.ramp_ends > planned.step
            said.append(f"weights {shares}{f', in full from step {planned.ramp_ends:,}' if late else ''}")
        sizes = ("global_batch_size", "sequence_length", "micro_batch_size")
        said += [f"{name} {value:,}" for name in sizes if (value := getattr(entry, name)) is not None]
        beyond = " (beyond run.steps)" if planned.step >= config.run.steps else ""
        at = f"after step {planned.step:,} and {planned.tokens:,} tokens ({si(planned.tokens)}){beyond}"
        lines.append(f"{at}: {'; '.join(said)}")
    return lines


def _toml(value: Any) -> str:
    return toml_text({"value": value}).removeprefix("value = ")


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,} ({si(value)})" if isinstance(value, int) and value >= 10_000 else f"{value:.4g}"
