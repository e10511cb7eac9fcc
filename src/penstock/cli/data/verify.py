"""`penstock data verify`: list every fault of a corpus."""

import argparse
import json
from pathlib import Path

from penstock.cli.data.describe import parts_of
from penstock.cli.options import CorpusOptions, OutputOptions, add_fields, options_of
from penstock.cli.progress import Display
from penstock.core.errors import UsageError
from penstock.core.units import mib, plural
from penstock.data.tools.verify import verify
from penstock.storage.block_checksums import FILE, write_block_checksums

EPILOG = """\
Checks of every shard: present, size, checksum, opens, document offsets, counts, end tokens, token ids
below the vocabulary; and the tokenizer's checksum. Reads the corpus once or twice, end to end. Files of
other tools have no checksums: their documents are indexed again and compared.

example:
  penstock data verify corpus
  penstock data verify corpus --block-checksums   # then upload it: wrong bytes are found on arrival
  penstock data verify olmo:/data/dolma,dtype=uint32,eos_id=100257

exit codes: 0 sound, 1 faults found (all are listed) or no corpus, 2 wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--block-checksums",
        action="store_true",
        help=f"if it is sound, write {FILE}, with which remote readers verify every 16 KiB",
    )
    add_fields(parser, CorpusOptions)
    add_fields(parser, OutputOptions)


def run(arguments: argparse.Namespace) -> int:
    """Verify a corpus; list every fault."""
    corpus = options_of(arguments, CorpusOptions).corpus
    folder = Path(corpus)
    if arguments.block_checksums and not folder.is_dir():
        raise UsageError(
            "--block-checksums needs a folder of this machine",
            got=corpus,
            fix="Run it before the upload.",
        )
    with Display() as display:
        verdict = verify(corpus, on_progress=lambda done, total: display.show("verify", done, total))
    manifest, faults = verdict.manifest, verdict.faults
    if options_of(arguments, OutputOptions).json:
        rows = [{"file": fault.file, "problem": fault.problem} for fault in faults]
        sound = {"corpus": corpus, "sound": not faults, "shards": len(manifest.shards)}
        sound |= {"parts": len(manifest.part_ends), "growing": manifest.streamed_parts == 0}
        print(json.dumps({**sound, "tokens": manifest.num_tokens, "faults": rows}))
    elif faults:
        for fault in faults:
            print(f"{corpus.rstrip('/')}/{fault.file}: {fault.problem}")
        print(f"{plural(len(faults), 'fault')}. Restore the named files, or prepare again with --restart.")
    else:
        size = sum(shard.bytes for shard in manifest.shards)
        shards = f"shards: {len(manifest.shards):,}{parts_of(manifest)}"
        counts = f"{manifest.num_tokens:,} tokens, {mib(size)}, {shards}"
        print(f"{corpus} is sound: {counts}.")
    if arguments.block_checksums and not faults:
        write_block_checksums(folder, [shard.name for shard in manifest.shards])
    return 1 if faults else 0
