"""List, show and check the recipes that come with Penstock.

example:
  penstock recipes list
  penstock recipes show llama3-8b > mine.toml
  penstock recipes check mine.toml --devices 64
"""

import argparse

from penstock.cli.options import add_subcommands, run_subcommand

COMMANDS = {
    "list": "list the recipes, with what each trains",
    "show": "print a recipe, as a start for your own",
    "check": "build a recipe's model without memory, and print its needs per device",
}
"""Subcommand -> description."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    add_subcommands(parser, "recipes", COMMANDS)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen subcommand."""
    return run_subcommand("recipes", arguments)
