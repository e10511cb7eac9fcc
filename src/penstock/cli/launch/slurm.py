"""`penstock launch slurm`: submit a recipe to Slurm."""

import argparse
import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from penstock.cli import launch_plan
from penstock.cli.launch_plan import SharedOptions
from penstock.cli.options import add_fields, options_of, text_file
from penstock.cli.streams import warn
from penstock.core.errors import PenstockError
from penstock.core.units import duration
from penstock.launch.engines.sbatch_options import check_extra
from penstock.launch.engines.slurm_queue import (
    check_partitions,
    check_preemption,
    limit_of,
    preemption_note,
)
from penstock.launch.render.slurm import render
from penstock.launch.spec import RunSpec, checked_setup, words_of_wrapper

EPILOG = """\
One batch script is written into RUN/launch and submitted. It examines the nodes, starts the ranks on all of
them, and starts them again when they fail. Before the time limit, when it is pre-empted, or when a node
is lost, the run saves if it can and goes back into the queue.

example:
  penstock launch slurm recipe.toml --nodes 4 --processes 8 --partition gpu --time-limit 24h --dry-run
  penstock launch slurm recipe.toml --nodes 4 --processes 8 --sbatch=--gpus-per-node=8 --sbatch=--qos=long
  penstock launch slurm recipe.toml --nodes 2:4 --secret WANDB_API_KEY=file:/home/me/.wandb-key

exit codes: 0 submitted, 1 Slurm refused or the run's folder is in use, 2 wrong recipe or usage. The
job's own: 0 finished or stopped for good, 75 requeued too often, 76 several starts in a row without a new
checkpoint
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """Options from which the fields of `RunSpec` for Slurm are made."""

    sbatch: Annotated[tuple[str, ...], "=OPTION"] = ()
    """An #SBATCH option, passed on."""
    setup: Annotated[Path | None, "FILE"] = None
    """Shell script that the job reads before it starts anything, such as `module load gcc`."""
    wrapper: Annotated[str | None, "COMMAND"] = None
    """Command that runs each node's `python3 -m penstock`, such as `apptainer exec IMAGE`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    launch_plan.add_arguments(parser)
    add_fields(
        parser,
        RunSpec,
        *("account", "time_limit_s", "max_requeues", "doctor"),
        defaults={"doctor": "report"},
        queue="--partition",
    )
    add_fields(parser, SlurmOptions)


def run(arguments: argparse.Namespace) -> int:
    """Submit the job, or show it."""
    options, of_slurm = options_of(arguments, SharedOptions), options_of(arguments, SlurmOptions)
    plan = launch_plan.planned(
        arguments,
        extras=tuple(map(check_extra, of_slurm.sbatch)),
        setup=checked_setup(text_file(of_slurm.setup, option="--setup")) if of_slurm.setup else "",
        wrapper=() if of_slurm.wrapper is None else words_of_wrapper(of_slurm.wrapper),
    )
    rendered = render(plan.spec)
    from penstock.launch.engines import slurm

    slurm.check_shell(plan.spec)
    measured = launch_plan.measured(plan.folder.run)
    if options.dry_run:
        asked = slurm.asked_partitions(plan.spec, is_tried=True)
        check_partitions(plan.spec, asked)
        notes = [f"sbatch --test-only: {slurm.checked_by_slurm(rendered)}"]
        limit_s = 0.0 if plan.spec.time_limit_s else limit_of(asked)
        if limit_s:
            notes.append(f"the partition ends a start after {duration(limit_s)}: no --time-limit is given")
        notes += filter(None, [preemption_note(asked, **measured)])
        launch_plan.show(plan, rendered, options, notes, limit_s=limit_s)
        return 0
    if options.explain:
        launch_plan.show(plan, rendered, options)
        return 0
    launch_plan.check_free(plan)
    check_preemption(slurm.asked_partitions(plan.spec), **measured)
    ident = slurm.submit(
        plan.spec, plan.folder, replace(rendered, files=launch_plan.files_of(plan, rendered))
    )
    run_folder = shlex.quote(plan.spec.run_dir)
    print(
        f"submitted job {ident}: penstock launch status {run_folder} | penstock launch logs {run_folder} -f"
    )
    with suppress(PenstockError):  # it is submitted
        state = slurm.ENGINE.state(plan.folder.job(), plan.folder)
        if state.is_stuck:
            warn(f"Job {ident} will not start by itself. {state.reason}.")
    return 0
