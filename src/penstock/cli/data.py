"""Prepare, describe and verify token corpora.

example:
  penstock data prepare docs/ --train-tokenizer 4096 --out corpus
  penstock data append corpus news.jsonl
  penstock data describe corpus
  penstock data verify corpus
"""

import argparse

from penstock.cli.subcommands import add_subcommands, run_subcommand
from penstock.core import log

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
"""Subcommand -> what it does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    add_subcommands(parser, "data", COMMANDS)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen subcommand."""
    with log.for_people():
        return run_subcommand("data", arguments)
