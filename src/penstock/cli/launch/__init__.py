"""Launch a recipe on this machine, on Slurm or on Kubernetes; watch, stop or resize it; deploy a server.

example:
  penstock launch local recipe.toml --nodes 2
  penstock launch local recipe.toml --nodes 1:3
  penstock launch slurm recipe.toml --nodes 4 --processes 8 --partition gpu --time-limit 24h --dry-run
  penstock launch kubernetes recipe.toml --nodes 4 --image registry/penstock:0.1 --volume runs:/runs --dry-run
  penstock launch server models/a --image registry/penstock:0.1 --volume models:/models --server=--insecure
  penstock launch list
  penstock launch status runs/first
  penstock launch logs runs/first -f --rank 3
  penstock launch resize runs/first 2
  penstock launch cancel runs/first

A run that is stopped, loses a node or is pre-empted continues from its newest checkpoint, with no sample lost
or repeated. It is given up after several starts in a row without a new checkpoint, and not after a number
of restarts. Every transition is in RUN/launch/events.jsonl with its cause.
"""

import argparse

from penstock.cli.options import add_subcommands, run_subcommand

COMMANDS = {
    "local": "run a recipe on this machine, as one node or as several groups of processes",
    "slurm": "submit a recipe to Slurm as one batch job, which supervises and requeues itself",
    "kubernetes": "submit a recipe to Kubernetes as a JobSet or TrainJob",
    "server": "deploy a server of a model on Kubernetes",
    "list": "list your jobs on this machine, Slurm and Kubernetes",
    "status": "show what a launched run does, and every transition with its cause",
    "logs": "print what a rank of a launched run printed",
    "cancel": "stop a launched run for good, after saving",
    "resize": "give a launched run another number of nodes",
    "supervise": "supervise a run inside its allocation; the batch script types this",
    "node": "run one node of a step; srun types this",
    "pod": "run one pod of a run; Kubernetes types this",
}
"""Subcommand -> description."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    add_subcommands(parser, "launch", COMMANDS)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen subcommand."""
    return run_subcommand("launch", arguments)
