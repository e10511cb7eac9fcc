"""`penstock recipes show`: the text of a recipe."""

import argparse

from penstock.train.resolve.load import recipe_text

EPILOG = """\
example:
  penstock recipes show llama3-8b
  penstock recipes show llama3-8b > mine.toml

exit codes: 0 done, 2 unknown recipe
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("name", metavar="NAME", help="a name from `penstock recipes list`")


def run(arguments: argparse.Namespace) -> int:
    """Print the recipe."""
    print(recipe_text(arguments.name), end="")
    return 0
