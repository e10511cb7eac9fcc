"""`penstock launch resize`: give a launched run another number of nodes."""

import argparse
import shlex

from penstock.cli.launch_plan import RECIPE_FILE, check_sizes
from penstock.cli.options import RunOptions, add_fields, options_of
from penstock.core.errors import UsageError
from penstock.launch.engines.engine import ENGINES
from penstock.launch.job_folder import JobFolder
from penstock.launch.spec import node_range
from penstock.train.control.requests import batch_size_of
from penstock.train.resolve.load import build_for_others, build_recipe, read_recipe

EPILOG = """\
The run saves a checkpoint, and continues with the new number of nodes: in place on this machine, as a new job
under Slurm and on Kubernetes. No sample is lost or repeated.

example:
  penstock launch resize runs/first 3

exit codes: 0 requested, 1 refused by the engine, 2 wrong usage, or the recipe cannot run on so many
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fields(parser, RunOptions)
    parser.add_argument(
        "nodes", metavar="N", help="number of nodes; under Slurm and on Kubernetes also MIN:MAX"
    )


def run(arguments: argparse.Namespace) -> int:
    """Ask for the nodes."""
    run = options_of(arguments, RunOptions).run
    folder = JobFolder(run.absolute())
    job, spec = folder.job(), folder.spec()
    nodes = node_range(arguments.nodes)
    if job.engine == "local":
        if nodes.is_elastic:
            raise UsageError(
                "A run on this machine takes one number of nodes",
                got=arguments.nodes,
                fix=f"Example: penstock launch resize {shlex.quote(str(run))} {nodes.most}",
            )
        if spec.nodes.is_elastic and not spec.nodes.least <= nodes.most <= spec.nodes.most:
            raise UsageError(
                f"The run was launched for {spec.nodes} nodes",
                got=arguments.nodes,
                fix="Give a number in that range, or cancel the run and launch it with other --nodes.",
            )
    build = build_recipe if spec.pod is None else build_for_others
    config, step = build(read_recipe(folder.path / RECIPE_FILE, [])), folder.progress()["step"] or 0
    check_sizes(spec.resized(nodes), config, step=step, batch_size=batch_size_of(folder.run, step=step))
    print(ENGINES[job.engine].resize(job, folder, nodes))
    return 0
