"""`penstock recipes list`: the recipes that come with Penstock, with their sizes."""

import argparse
import json
import tomllib

from penstock.core.units import si
from penstock.train.planning.devices import plan_recipe
from penstock.train.resolve.load import about, recipe_names, recipe_text

EPILOG = """\
example:
  penstock recipes list
  penstock recipes list --json

exit codes: 0 done, 2 wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """List the recipes."""
    rows = []
    for name in recipe_names():
        text = recipe_text(name)
        plan = plan_recipe(tomllib.loads(text))
        rows.append(
            {
                "name": name,
                "about": about(text),
                "parameters": plan.config.model.num_parameters,
                "tokens_per_step": plan.tokens_per_step,
                "tokens": plan.tokens,
            }
        )
    if arguments.json:
        print(json.dumps(rows))
        return 0
    width = max(len(str(row["name"])) for row in rows)
    print(f"{'recipe':<{width}}  parameters  tokens/step  tokens  ")
    for row in rows:
        sizes = [si(float(str(row[key]))) for key in ("parameters", "tokens_per_step", "tokens")]
        print(f"{row['name']:<{width}}  {sizes[0]:>10}  {sizes[1]:>11}  {sizes[2]:>6}  {row['about']}")
    return 0
