"""Prepare, describe and verify token corpora.

example:
  penstock data prepare docs/ --train-tokenizer 4096 --out corpus
  penstock data append corpus news.jsonl
  penstock data describe corpus
  penstock data verify corpus
"""

import argparse
from importlib import import_module

COMMANDS = {
    "prepare": "turn text, JSON lines and Parquet into token shards",
    "append": "add text to a corpus, as a new part of it",
    "describe": "show what is in a corpus: sizes, document lengths, samples",
    "verify": "check every byte of a corpus against its manifest",
    "index": "find out what the files of another tool hold, before a run does",
    "convert": "write a corpus of any format as Arrow shards, or as Megatron-LM's files",
    "mix": "show the mixture of a run; tell a running job to change it",
    "where": "show which documents a row of a step was made of",
    "find": "list the steps that train on a document",
    "replay": "write the batches of some steps to files",
    "audit": "prove that a run trained on every sample of its order, once",
}
"""Subcommand -> what it does. Each is a module `penstock.cli.data_<name>` with `EPILOG`,
`add_arguments(parser)` and `run(arguments) -> int`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        module = import_module(f"penstock.cli.data_{name}")
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen subcommand."""
    code: int = import_module(f"penstock.cli.data_{arguments.command}").run(arguments)
    return code
