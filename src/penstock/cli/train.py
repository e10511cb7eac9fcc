"""Train a model from a recipe, on one process or many; run the same command again to resume.

example:
  penstock train recipe.toml
  penstock train recipe.toml --set run.steps=2000 --set optim.learning_rate=1e-3 --processes 2
  penstock train recipe.toml --dry-run
  penstock train recipe.toml --set plan=auto --processes 8
  torchrun --nproc-per-node 8 -m penstock train recipe.toml

The run's folder (run.dir) holds checkpoints/, metrics.jsonl, config.json, starts/ (the recipe of
each start) and, with run.log_samples, samples/. A run resumes from its newest complete
checkpoint, on any number of processes, with no sample lost or repeated.

exit codes: 0 finished, 1 failed, 2 wrong recipe or usage, 75 stopped by SIGTERM, Ctrl-C or
a closed terminal after saving a checkpoint
"""

import argparse

from penstock.cli import training_job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    training_job.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train."""
    return training_job.run_recipe(arguments, tunes=False)
