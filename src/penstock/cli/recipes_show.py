"""`penstock recipes show`: a recipe as its author wrote it."""

import argparse

from penstock.train.shipped import recipe_text

EPILOG = """\
example:
  penstock recipes show llama3-8b
  penstock recipes show llama3-8b > mine.toml

exit codes: 0 done, 2 no recipe of that name
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("name", metavar="NAME", help="one that `penstock recipes list` lists")


def run(arguments: argparse.Namespace) -> int:
    """Print the recipe."""
    print(recipe_text(arguments.name), end="")
    return 0
