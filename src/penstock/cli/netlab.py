"""Try a recipe on emulated hosts of this machine, joined by a network as slow as you say. Linux only.

example:
  penstock netlab run recipe.toml --hosts 2 --rate 200mbit
  penstock netlab run recipe.toml --hosts 2 --nics 2 --rate 500mbit --latency 1ms --json
"""

import argparse

from penstock.cli.subcommands import add_subcommands, run_subcommand

COMMANDS = {"run": "train a few steps of a recipe, and say what the network makes of them"}
"""Subcommand -> what it does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    add_subcommands(parser, "netlab", COMMANDS)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen subcommand."""
    return run_subcommand("netlab", arguments)
