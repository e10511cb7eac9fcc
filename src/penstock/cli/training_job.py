"""Run the training job of a recipe, for `penstock train`, `penstock tune` and ranks of a launched run."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from penstock.cli.options import RecipeOptions, add_fields, add_recipe_settings, options_of, recipe_settings
from penstock.cli.streams import complain, explain, note, warn
from penstock.core import env, log
from penstock.core.config import Raw
from penstock.core.errors import UsageError
from penstock.core.signals import STOPPED_EARLY, StopFlag
from penstock.devices.kernel_table import AUTO, REFERENCE
from penstock.launch.local import EXIT_STOPPED, JobOutcome, check_processes
from penstock.launch.local import run as run_processes
from penstock.launch.spec import RunSpec
from penstock.parallel.layout import layout_of
from penstock.train.control.resize_islands import Islands
from penstock.train.planning.capacity import check_host, may_have_accelerators, memory_of
from penstock.train.recipe.config import TrainConfig
from penstock.train.resolve.load import build_recipe, check_command, read_recipe
from penstock.train.resolve.summary import derive


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options of a job on this machine."""

    processes: int = 1
    """Processes on this machine."""
    oversubscribe: bool = False
    """Start more than 4 processes on a core, or more than fits into the memory."""
    dry_run: bool = False
    """Print the resolved recipe and what follows from it, then stop."""
    json: bool = False
    """With --dry-run: print JSON."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fields(parser, RecipeOptions, "recipe")
    add_recipe_settings(parser)
    add_fields(parser, JobOptions)


def run_recipe(arguments: argparse.Namespace, *, tunes: bool) -> int:
    """Train on the recipe of the command line; return the exit code.

    Args:
        tunes: the command is for recipes that tune a model, which have a [tune] section; False: for others.

    Raises:
        ConfigError: the recipe is for the other command.
    """
    flag, options = StopFlag(), options_of(arguments, JobOptions)
    if not options.dry_run:
        flag.install(end_early)  # before torch is imported: a scheduler may ask only once
        check_processes(options.processes, oversubscribe=options.oversubscribe)
    raw = read_recipe(options_of(arguments, RecipeOptions).recipe, recipe_settings(arguments))
    check_command(raw, tunes=tunes)
    config = build_recipe(raw)
    if options.dry_run:
        return _show(options, raw, config)
    if not config.plan and not may_have_accelerators():
        _check_memory(options, config)
    from penstock.train.planning.auto import plan_on_ranks  # torch; imported once, before processes fork
    from penstock.train.run import run as train_here

    plan = partial(plan_on_ranks, raw, config) if config.plan else None
    work = partial(train_here, config, flag, plan, oversubscribe=options.oversubscribe)

    if options.processes == 1 and (env.ranks().world_size > 1 or not config.outer.min_islands):
        code = _ended(work())
        return code if env.ranks().world_size == 1 else _leave(code)
    from penstock.parallel.apply import import_sharing

    import_sharing()
    log.set_up()
    outcome = run_processes(
        lambda: _ended(work()),
        _with_traceback if arguments.debug else explain,
        processes=options.processes,
        again=_again(config, processes=options.processes),
    )
    for message in outcome.messages:
        complain(message)
    return outcome.code


def work_of(spec: RunSpec) -> Callable[[], int]:
    """Return the work of a launched rank; imports what it needs, so that forked processes import little.

    Sets `env.NODES` for the ranks.

    Raises:
        UsageError: this node has too few cores for its processes.
    """
    verb, *words = spec.command
    parser = argparse.ArgumentParser(prog=f"penstock {verb}")
    add_arguments(parser)
    arguments = parser.parse_args(words)
    arguments.debug = False
    check_processes(spec.processes, oversubscribe=options_of(arguments, JobOptions).oversubscribe)
    env.silence_torch()
    import penstock.train.planning.auto
    import penstock.train.run
    from penstock.parallel.apply import import_sharing

    import_sharing()
    if verb == "tune":
        import penstock.train.tune.choose  # noqa: F401
    env.set_variables({env.NODES: str(spec.nodes) if spec.nodes.is_elastic else ""})
    return partial(run_recipe, arguments, tunes=verb == "tune")


def _show(options: JobOptions, raw: Raw, config: TrainConfig) -> int:
    """Print a recipe and what follows from it; what this machine would refuse is a warning, as it may run
    on another."""
    if config.plan:
        from penstock.train.planning.auto import planned  # torch

        config = build_recipe(planned(raw, config, world_size=options.processes))
    derived, kernels = derive(config, world_size=options.processes), _kernels(options, config)
    if options.json:
        print(json.dumps({**derived.as_json(), "kernels": kernels}, indent=1))
    else:
        print(
            "\n".join(
                [derived.as_text(), "", "kernels:", *(f"  {name}: {text}" for name, text in kernels.items())]
            )
        )
    try:
        check_processes(options.processes, oversubscribe=options.oversubscribe)
        if not may_have_accelerators():
            _check_memory(options, config)
    except UsageError as error:
        warn(f"On this machine it would be refused: {error}")
    return 0


def _kernels(options: JobOptions, config: TrainConfig) -> dict[str, str]:
    """Return the kernels of a run in words, by operation; of a CPU without importing torch for it."""
    if not may_have_accelerators() and config.kernels in (AUTO, REFERENCE):
        return {"all": "the first of each list, on CPUs"}
    from penstock.devices import accelerator  # torch
    from penstock.train.kernels import shown_kernels

    layout = layout_of(config.parallel, world_size=options.processes)
    return shown_kernels(config, layout, accelerator.choose())


def _check_memory(options: JobOptions, config: TrainConfig) -> None:
    """Refuse a run on processors that does not fit into this machine, before torch is imported.

    Raises:
        ConfigError: it does not.
    """
    many = options.processes > 1
    here = options.processes if many else env.local_world_size()
    world_size = options.processes if many else env.ranks().world_size
    needed = memory_of(config, world_size=world_size, here=here, on_cpu=True)
    check_host(needed, here=here, oversubscribe=options.oversubscribe)


def end_early(_signal: str) -> NoReturn:
    """End a process that was asked to stop before it began."""
    os.write(2, f"penstock: {STOPPED_EARLY}\n".encode())
    os._exit(EXIT_STOPPED)


def _again(config: TrainConfig, *, processes: int) -> Callable[[JobOutcome], int]:
    """Return what says on how many processes a job is to be started anew."""
    if not config.outer.min_islands:
        return lambda _: 0
    return Islands(config, processes=processes, say=note).again


def _with_traceback(error: BaseException) -> tuple[str, int]:
    raise error


def _leave(code: int) -> NoReturn:
    """End a rank that is done without tearing its interpreter down.

    Threads of gloo can still be there when C++ objects are destroyed, which aborts the process now and then;
    a scheduler would then take a finished run for a failed one.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _ended(finished: bool) -> int:
    return 0 if finished else EXIT_STOPPED
