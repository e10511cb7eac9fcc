"""Tune a model on conversations or any other corpus, from a recipe; run the same command again to resume.

The recipe names the model in run.start_from, a Hugging Face folder or a run, and the method in its
section [tune]: all weights, or an adapter (LoRA, rsLoRA, DoRA). All else is as in `penstock train`:
one process or many, any layout, killed and rescaled.

example:
  penstock tune recipe.toml
  penstock tune recipe.toml --set tune.method=lora --set tune.rank=32 --processes 2
  penstock tune recipe.toml --dry-run
  penstock export runs/mine --out adapter    # an adapter; the run may still train
  penstock serve ./Qwen3-0.6B --adapter mine=adapter

The run's folder (run.dir) is a model: `penstock generate`, `chat`, `eval`, `serve` and `export` take it.

exit codes: 0 finished, 1 failed, 2 wrong recipe or usage, 75 stopped by SIGTERM, Ctrl-C or
a closed terminal after saving a checkpoint
"""

import argparse

from penstock.cli import training_job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    training_job.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Tune."""
    return training_job.run_recipe(arguments, tunes=True)
