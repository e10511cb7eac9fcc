"""Subcommands of a verb: each is a module `penstock.cli.<verb>_<name>`.

Such a module has `EPILOG`, `add_arguments(parser)` and `run(arguments) -> int`.
"""

import argparse
from collections.abc import Mapping
from importlib import import_module


def add_subcommands(
    parser: argparse.ArgumentParser, verb: str, summaries: Mapping[str, str]
) -> list[argparse.ArgumentParser]:
    """Add the subcommands of a verb; return their parsers.

    Args:
        summaries: subcommand -> what it does.
    """
    found = []
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in summaries.items():
        module = import_module(f"penstock.cli.{verb}_{name}")
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        found.append(command)
    return found


def run_subcommand(verb: str, arguments: argparse.Namespace) -> int:
    """Run the subcommand that was chosen."""
    code: int = import_module(f"penstock.cli.{verb}_{arguments.command}").run(arguments)
    return code
