"""List the checkpoints of a run, or verify every byte of them.

example:
  penstock checkpoint list runs/first
  penstock checkpoint verify runs/first
  penstock checkpoint verify runs/first --step 2000 --json
  penstock checkpoint list s3://bucket/checkpoints/first
"""

import argparse

from penstock.cli.options import add_subcommands, run_subcommand

COMMANDS = {
    "list": "list the checkpoints from which a run can resume",
    "verify": "verify every byte of checkpoints by their checksums",
}
"""Subcommand -> description."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    for command in add_subcommands(parser, "checkpoint", COMMANDS):
        command.add_argument(
            "run", metavar="RUN", help="folder of a run, one checkpoint, or the address of checkpoints"
        )
        command.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen subcommand."""
    return run_subcommand("checkpoint", arguments)
