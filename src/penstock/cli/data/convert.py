"""`penstock data convert`: write a corpus of any format as Arrow shards or Megatron-LM files."""

import argparse
import json
from pathlib import Path

from penstock.cli.progress import Display
from penstock.core.units import mib, parse_count, plural
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("corpus", metavar="CORPUS", help="folder, address, or FORMAT:PATH[,option=value,...]")
    add("--to", choices=("arrow", "megatron"), required=True, help="format to write")
    add("--out", type=Path, required=True, metavar="DIR", help="new folder; must not exist")
    add("--shard-tokens", type=parse_count, default=SHARD_TOKENS, metavar="N",
        help="split larger shards; one is held in memory (default 100M)")  # fmt: skip
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Convert a corpus and print a summary."""
    with Display() as display:
        manifest = convert(
            arguments.corpus,
            arguments.out,
            to=arguments.to,
            shard_tokens=arguments.shard_tokens,
            on_progress=lambda done, total: display.show("convert", done, total, tokens=done),
        )
    counts = {"tokens": manifest.num_tokens, "documents": manifest.num_documents}
    size = sum(shard.bytes for shard in manifest.shards)
    if arguments.json:
        rows = {"corpus": str(arguments.out), **counts, "shards": len(manifest.shards), "bytes": size}
        print(json.dumps({**rows, "fingerprint": manifest.fingerprint}))
    else:
        documents = plural(manifest.num_documents, "document")
        shards = f"{mib(size)}, shards: {len(manifest.shards):,}"
        print(f"{arguments.out}: {manifest.num_tokens:,} tokens in {documents}, {shards}.")
    return 0
