"""`penstock launch local`: run a recipe on this machine."""

import argparse
import sys

from penstock.cli import launch_plan
from penstock.cli.launch_plan import LaunchOptions, SharedOptions
from penstock.cli.options import options_of
from penstock.cli.streams import explain, note
from penstock.core import log
from penstock.core.env import num_cores
from penstock.core.files import write_atomic
from penstock.core.signals import StopFlag
from penstock.launch.local import check_processes
from penstock.launch.nodes.node import check_node
from penstock.launch.render.local import render
from penstock.train.planning.capacity import check_host, may_have_accelerators, memory_of

EPILOG = """\
Each node is a group of processes. With --nodes MIN:MAX nodes may join and leave during the run: `penstock
launch resize` adds or removes nodes, and a killed node does not return. Without MIN:MAX, a failed run
restarts from its newest checkpoint. All processes end with this command.

example:
  penstock launch local recipe.toml --nodes 2 --processes 2
  penstock launch local recipe.toml --nodes 1:3 --grace 30
  penstock launch local recipe.toml --nodes 2 --dry-run --explain

exit codes: 0 finished, 1 failed, 2 wrong recipe or usage, 75 stopped after saving, 76 several starts in a
row without a new checkpoint
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    launch_plan.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the job to its end, or show it."""
    flag = StopFlag().install()  # before torch is imported
    plan, options = launch_plan.planned(arguments), options_of(arguments, SharedOptions)
    if options.dry_run or options.explain:
        launch_plan.show(plan, render(plan.spec, cores=num_cores()), options)
        return 0
    _check_machine(plan, oversubscribe=options_of(arguments, LaunchOptions).oversubscribe)
    launch_plan.check_free(plan)
    check_node(plan.spec)
    from penstock.cli.training_job import work_of
    from penstock.launch.engines.local import run_local

    plan.folder.make()
    with plan.folder.held():  # or another launch changes the recipe of a run that goes on
        write_atomic(plan.folder.path / launch_plan.RECIPE_FILE, plan.recipe)
    work = work_of(plan.spec)
    log.set_up()
    code = run_local(plan.spec, plan.folder, work, explain, flag=flag, say=note)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _check_machine(plan: launch_plan.LaunchPlan, *, oversubscribe: bool) -> None:
    """Refuse more processes, or a larger run, than this machine can take with the most nodes.

    Raises:
        UsageError: the message has both numbers.
    """
    ranks = plan.spec.most_ranks
    check_processes(ranks, oversubscribe=oversubscribe)
    if not plan.config.plan and not may_have_accelerators():
        needed = memory_of(plan.config, world_size=ranks, here=ranks, on_cpu=True)
        check_host(needed, here=ranks, oversubscribe=oversubscribe)
