"""`penstock data index`: find out once what the files of another tool hold, before a run needs to know."""

import argparse
import json

from penstock.cli.data_progress import Display
from penstock.core.units import mib, plural
from penstock.data.opening import described
from penstock.data.spec import parse_spec

EPILOG = """\
A corpus that another tool made is indexed when it is first opened. That takes a moment where its files store
their documents, and one pass over all tokens where they do not (nanoGPT, OLMo without metadata): do that
here, once, rather than in every process of a run. The index is kept in .penstock beside the files, or in the
cache folder of the user where that cannot be written; it is made again when the files change.

example:
  penstock data index olmo:/data/dolma,dtype=uint32,eos_id=100257

exit codes: 0 done, 1 no corpus there or a damaged one, 2 wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("corpus", metavar="CORPUS", help="folder, address, or FORMAT:PATH[,option=value,...]")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Index a corpus and say what is in it."""
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
