"""`penstock data index`: index the files of another tool once, before a run does."""

import argparse
import json

from penstock.cli.progress import Display
from penstock.core.units import mib, plural
from penstock.data.corpus.open import described
from penstock.data.corpus.spec import parse_spec

EPILOG = """\
A corpus of another tool is indexed when it is first opened. That takes a moment if its files contain
document boundaries, and one pass over all tokens if they do not (nanoGPT, OLMo without metadata): do that
here, once, rather than in every process of a run. The index is stored in .penstock in the same folder, or in
the user's cache folder if that is not writable; it is made again when the files change.

example:
  penstock data index olmo:/data/dolma,dtype=uint32,eos_id=100257

exit codes: 0 done, 1 no corpus or a damaged one, 2 wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("corpus", metavar="CORPUS", help="folder, address, or FORMAT:PATH[,option=value,...]")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Index a corpus and print its counts."""
    with Display() as display:
        _, manifest = described(
            parse_spec(arguments.corpus), on_progress=lambda done, total: display.show("index", done, total)
        )
    size = sum(shard.bytes for shard in manifest.shards)
    if arguments.json:
        row = {
            "corpus": arguments.corpus,
            "format": manifest.format,
            "tokens": manifest.num_tokens,
            "documents": manifest.num_documents,
            "shards": len(manifest.shards),
            "bytes": size,
            "dtype": manifest.dtype,
            "vocab_size": manifest.vocab_size,
            "fingerprint": manifest.fingerprint,
        }
        print(json.dumps(row))
    else:
        counts = f"{manifest.num_tokens:,} tokens in {plural(manifest.num_documents, 'document')}"
        print(f"{arguments.corpus}: {counts}, {mib(size)}, shards: {len(manifest.shards):,}.")
    return 0
