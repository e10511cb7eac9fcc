"""Measure which kernel computes each operation of a model fastest on this device, and keep the choice.

MODEL is a recipe (a TOML file), for attention in training; or a run, a checkpoint or a Hugging Face folder,
for attention over pages and products in serving. Each kernel is first tested against float64; one that fails
is left out. On GPUs the table is kept, and training and serving use it (kernels = "auto"). On CPUs, where
nothing is chosen by measurement, it is only shown and written to --out.

example:
  penstock kernels recipe.toml
  penstock kernels ./Llama-3.1-8B --weights int4 --out h100.json --json
  penstock serve ./Llama-3.1-8B --weights int4 --kernels h100.json

exit codes: 0 done, 1 no kernel of an operation is right here, 2 wrong usage
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from penstock.cli.options import (
    Positional,
    add_fields,
    add_recipe_settings,
    fields_of,
    options_of,
    recipe_settings,
)
from penstock.cli.streams import note
from penstock.core import clock
from penstock.core.files import check_folder_of
from penstock.core.log import set_up
from penstock.core.units import plural
from penstock.devices.kernel_table import KernelTable, kept
from penstock.engine.config import EngineConfig

if TYPE_CHECKING:
    import torch

    from penstock.devices.kernel_choice import Operation

_EACH_S, _COSTLY_S = 0.5, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """Options of a measurement of kernels."""

    model: Annotated[Path, Positional("MODEL")]
    """Recipe, run, checkpoint or Hugging Face folder."""
    processes: int = 1
    """Processes of the recipe's run."""
    quick: bool = False
    """Leave out kernels that must be compiled or take memory."""
    show: bool = False
    """Print the kept choice, and measure nothing."""
    out: Annotated[Path | None, "FILE"] = None
    """Write the table, for kernels = FILE."""
    json: bool = False
    """Print the table as JSON."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fields(parser, KernelOptions)
    add_fields(
        parser.add_argument_group("of serving"),
        EngineConfig,
        *("device", "weights", "cache", "max_sequences", "max_context", "block_size"),
    )
    add_recipe_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and keep."""
    options = options_of(arguments, KernelOptions)
    if options.out:
        check_folder_of(options.out, option="--out")
    set_up()
    from penstock.devices import accelerator  # torch
    from penstock.devices.kernel_choice import identity_of, keep, measure

    device = accelerator.choose()
    operations_of = _of_training if options.model.is_file() else _of_serving
    operations = operations_of(arguments, options, device)
    name, versions = identity_of(device)
    known = kept(name, versions).rows
    if options.show:
        rows = {one.key: known[one.key] for one in operations if one.key in known}
        missing = [one.key for one in operations if one.key not in known]
    else:
        missing = []
        _announce(operations, name, is_quick=options.quick)
        started = clock.monotonic()
        rows = {one.key: measure(one, device, on_purpose=not options.quick) for one in operations}
        note(f"Measured in {clock.monotonic() - started:.1f} s")
    table = KernelTable(device=name, versions=versions, rows=rows)
    if accelerator.is_accelerator(device) and not options.show:
        keep(table)
    if options.out:
        table.write(options.out)
    print(json.dumps(asdict(table)) if options.json else "\n".join(_as_text(table, missing)))
    return 0


def _of_training(
    arguments: argparse.Namespace, options: KernelOptions, device: "torch.device"
) -> "list[Operation[Any]]":
    from penstock.parallel.layout import layout_of
    from penstock.train.kernels import operations_of
    from penstock.train.resolve.load import build_recipe, read_recipe

    config = build_recipe(read_recipe(options.model, recipe_settings(arguments)))
    return operations_of(config, layout_of(config.parallel, world_size=options.processes), device)


def _of_serving(
    arguments: argparse.Namespace, options: KernelOptions, device: "torch.device"
) -> "list[Operation[Any]]":
    import torch

    from penstock.engine.kernels import operations_of
    from penstock.engine.model_runner.kv_cache import type_of_pages
    from penstock.engine.model_runner.open import open_config

    config = EngineConfig(**fields_of(arguments, EngineConfig))
    model = open_config(options.model, ignored_keys=config.ignored_keys)
    dtype = torch.float32 if config.weights == "float32" else torch.bfloat16
    pages = type_of_pages(config.cache, dtype=dtype, head_dim=model.size_of_head)
    return operations_of(model, config, dtype=dtype, pages=pages, device=device)


def _announce(operations: "list[Operation[Any]]", name: str, *, is_quick: bool) -> None:
    costly = sum(len(one.costly) for one in operations)
    plain = sum(len(one.kernels) for one in operations) - costly
    more = f", and up to {_COSTLY_S * costly:.0f} s for {plural(costly, 'more')} that cost more"
    note(
        f"{name}: {plural(plain, 'kernel')} of {plural(len(operations), 'operation')}, "
        f"about {_EACH_S * plain:.0f} s{more if costly and not is_quick else ''}"
    )


def _as_text(table: KernelTable, missing: list[str]) -> list[str]:
    lines = [f"{table.device} ({', '.join(f'{name} {text}' for name, text in table.versions.items())})"]
    for key, row in table.rows.items():
        lines += ["", key, f"  {row}"]
        others = sorted((us, name) for name, us in row.us.items() if name != row.kernel)
        lines += [f"  {name}: {us:.4g} us" for us, name in others]
        lines += [f"  {name}: out, {why}" for name, why in row.out.items()]
    lines += [f"{key}: not chosen yet on this device" for key in missing]
    return (
        lines if table.rows or missing else [*lines, "No operation of this model has several kernels here."]
    )
