"""Prepare, describe and verify token corpora.

example:
  penstock data prepare docs/ --train-tokenizer 4096 --out corpus
  penstock data append corpus news.jsonl
  penstock data describe corpus
  penstock data verify corpus
"""

import argparse

from penstock.cli.options import add_subcommands, run_subcommand
from penstock.core import log

COMMANDS = {
    "prepare": "turn text, JSON lines and Parquet into token shards",
    "append": "add text to a corpus, as a new part",
    "describe": "show sizes, document lengths and samples of a corpus",
    "verify": "check every byte of a corpus against its manifest",
    "index": "index the files of another tool, before a run does",
    "teach": "write a teacher's most likely tokens for a corpus, for distillation",
    "convert": "write a corpus of any format as Arrow shards, or as Megatron-LM's files",
    "where": "show the documents in a row of a step",
    "find": "list the steps that train on a document",
    "replay": "write the batches of some steps to files",
    "inspect": "answer questions about runs as JSON lines, as `penstock console` asks them",
    "audit": "verify that a run trained on every sample of its order, once",
}
"""Subcommand -> description."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    add_subcommands(parser, "data", COMMANDS)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen subcommand."""
    with log.warnings_once():
        return run_subcommand("data", arguments)
