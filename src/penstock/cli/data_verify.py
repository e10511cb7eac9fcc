"""`penstock data verify`: every fault of a corpus."""

import argparse
import json
from pathlib import Path

from penstock.cli.data_progress import Display
from penstock.core.units import mib, plural
from penstock.data.verify import verify

EPILOG = """\
Checks of every shard: present, size, checksum, opens, document offsets, counts, end tokens, token ids
below the vocabulary; and the tokenizer's checksum. Reads the corpus once or twice, end to end.

example:
  penstock data verify corpus

exit codes: 0 sound, 1 faults found (all are listed) or no corpus there, 2 wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of the corpus")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Verify a corpus; list every fault."""
    with Display() as display:
        verdict = verify(
            arguments.folder, on_progress=lambda done, total: display.show("verify", done, total)
        )
    manifest, faults = verdict.manifest, verdict.faults
    if arguments.json:
        rows = [{"file": fault.file, "problem": fault.problem} for fault in faults]
        sound = {"corpus": str(arguments.folder), "sound": not faults, "shards": len(manifest.shards)}
        print(json.dumps({**sound, "tokens": manifest.num_tokens, "faults": rows}))
    elif faults:
        for fault in faults:
            print(f"{arguments.folder / fault.file}: {fault.problem}")
        print(f"{plural(len(faults), 'fault')}. Restore what is named, or prepare again with --restart.")
    else:
        size = sum(shard.bytes for shard in manifest.shards)
        counts = f"{manifest.num_tokens:,} tokens, {mib(size)}, shards: {len(manifest.shards):,}"
        print(f"{arguments.folder} is sound: {counts}.")
    return 1 if faults else 0
