"""`penstock data index`: index the files of another tool once, before a run does."""

import argparse
import json

from penstock.cli.options import CorpusOptions, OutputOptions, add_fields, options_of
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
    add_fields(parser, CorpusOptions)
    add_fields(parser, OutputOptions)


def run(arguments: argparse.Namespace) -> int:
    """Index a corpus and print its counts."""
    corpus = options_of(arguments, CorpusOptions).corpus
    with Display() as display:
        _, manifest = described(
            parse_spec(corpus), on_progress=lambda done, total: display.show("index", done, total)
        )
    size = sum(shard.bytes for shard in manifest.shards)
    if options_of(arguments, OutputOptions).json:
        row = {
            "corpus": corpus,
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
        print(f"{corpus}: {counts}, {mib(size)}, shards: {len(manifest.shards):,}.")
    return 0
