"""List the checkpoints of a run, and check every byte of them.

example:
  penstock checkpoint list runs/first
  penstock checkpoint verify runs/first
  penstock checkpoint verify runs/first --step 2000 --json
  penstock checkpoint list s3://bucket/checkpoints/first
"""

import argparse
from importlib import import_module

COMMANDS = {
    "list": "show what a run can be resumed from",
    "verify": "check every byte of checkpoints against their checksums",
}
"""Subcommand -> what it does. Each is a module `penstock.cli.checkpoint_<name>` with `EPILOG`,
`add_arguments(parser)` and `run(arguments) -> int`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        module = import_module(f"penstock.cli.checkpoint_{name}")
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument(
            "run", metavar="RUN", help="folder of a run, one checkpoint, or the address of checkpoints"
        )
        command.add_argument("--json", action="store_true", help="print JSON")
        module.add_arguments(command)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen subcommand."""
    code: int = import_module(f"penstock.cli.checkpoint_{arguments.command}").run(arguments)
    return code
