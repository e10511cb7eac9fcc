"""List the checkpoints of a run, and check every byte of them.

example:
  penstock checkpoint list runs/first
  penstock checkpoint verify runs/first
  penstock checkpoint verify runs/first --step 2000 --json
  penstock checkpoint list s3://bucket/checkpoints/first
"""

import argparse

from penstock.cli.subcommands import add_subcommands, run_subcommand

COMMANDS = {
    "list": "show what a run can be resumed from",
    "verify": "check every byte of checkpoints against their checksums",
}
"""Subcommand -> what it does."""


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
