"""`penstock data convert`: write a corpus of any format as Arrow shards or Megatron-LM files."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from penstock.cli.options import CorpusOptions, OutputOptions, add_fields, options_of
from penstock.cli.progress import Display
from penstock.core.units import Count, mib, plural
from penstock.data.tools.convert import SHARD_TOKENS, convert

EPILOG = """\
Training needs no conversion: corpora of Megatron-LM, datatrove, OLMo, nanoGPT and others are read in place
(see `penstock data verify --help` for their names). Shards stay as they are, except those larger than
--shard-tokens, which are split between documents.

example:
  penstock data convert corpus --to megatron --out corpus-megatron
  penstock data convert nanogpt:data/train.bin,eos_id=50256 --to arrow --out corpus

exit codes: 0 done, 1 failed, 2 wrong usage
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Options of a conversion."""

    to: Literal["arrow", "megatron"]
    """Format to write."""
    out: Annotated[Path, "DIR"]
    """New folder; must not exist."""
    shard_tokens: Count = SHARD_TOKENS
    """Split larger shards; one is held in memory."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_fields(parser, CorpusOptions)
    add_fields(parser, ConvertOptions)
    add_fields(parser, OutputOptions)


def run(arguments: argparse.Namespace) -> int:
    """Convert a corpus and print a summary."""
    options = options_of(arguments, ConvertOptions)
    with Display() as display:
        manifest = convert(
            options_of(arguments, CorpusOptions).corpus,
            options.out,
            to=options.to,
            shard_tokens=options.shard_tokens,
            on_progress=lambda done, total: display.show("convert", done, total, tokens=done),
        )
    counts = {"tokens": manifest.num_tokens, "documents": manifest.num_documents}
    size = sum(shard.bytes for shard in manifest.shards)
    if options_of(arguments, OutputOptions).json:
        rows = {"corpus": str(options.out), **counts, "shards": len(manifest.shards), "bytes": size}
        print(json.dumps({**rows, "fingerprint": manifest.fingerprint}))
    else:
        documents = plural(manifest.num_documents, "document")
        shards = f"{mib(size)}, shards: {len(manifest.shards):,}"
        print(f"{options.out}: {manifest.num_tokens:,} tokens in {documents}, {shards}.")
    return 0
