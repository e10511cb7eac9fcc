"""`penstock data describe`: a summary of a corpus."""

import argparse
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from penstock.core.units import mib, plural
from penstock.data.corpus.manifest import Manifest
from penstock.data.tools.describe import Description, describe

_BAR_WIDTH = 40

EPILOG = """\
Lengths are exact, over all documents, in tokens with the end token counted; memory stays bounded.

example:
  penstock data describe corpus
  penstock data describe megatron:/data/web_text_document

exit codes: 0 done, 1 no corpus or a damaged one, 2 wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("corpus", metavar="CORPUS", help="folder, address, or FORMAT:PATH[,option=value]")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the description of a corpus."""
    found = describe(arguments.corpus)
    print(json.dumps(as_json(found)) if arguments.json else "\n".join(as_text(found)))
    return 0


def as_json(found: Description) -> dict[str, Any]:  # Any: what JSON can write
    """Return a description as JSON values."""
    manifest, lengths = found.manifest, found.lengths
    return {
        "corpus": found.location,
        "tokens": manifest.num_tokens,
        "documents": manifest.num_documents,
        "shards": len(manifest.shards),
        "parts": [
            {"shards": end - start, "tokens": sum(shard.tokens for shard in manifest.shards[start:end])}
            for start, end in pairwise((0, *manifest.part_ends))
        ],
        "growing": manifest.streamed_parts == 0,
        "bytes": found.num_bytes,
        "text_bytes": manifest.text_bytes,
        "tokens_per_byte": _tokens_per_byte(found),
        "dtype": manifest.dtype,
        "vocab_size": manifest.vocab_size,
        "eos_id": manifest.eos_id,
        "tokenizer": manifest.tokenizer,
        "rejected": manifest.rejected,
        "fingerprint": manifest.fingerprint,
        "unigram_entropy": found.unigram_entropy,
        "document_tokens": {
            "min": lengths.min,
            "median": lengths.median,
            "mean": lengths.mean,
            "max": lengths.max,
            "histogram": [{"from": low, "below": high, "documents": n} for low, high, n in lengths.histogram],
        },
        "samples": [{"position": s.position, "text": s.text, "whole": s.whole} for s in found.samples],
    }


def as_text(found: Description) -> Iterator[str]:
    """Yield a description as text lines."""
    manifest, lengths = found.manifest, found.lengths
    yield f"corpus {found.location}"
    yield f"  tokens       {manifest.num_tokens:,} ({manifest.dtype}, {mib(found.num_bytes)})"
    yield f"  documents    {manifest.num_documents:,}"
    yield f"  shards       {len(manifest.shards):,}{parts_of(manifest)}"
    if rate := _tokens_per_byte(found):
        yield f"  text         {mib(manifest.text_bytes)}, {rate:.3f} tokens per byte"
    end = "no end token" if manifest.eos_id is None else f"end token {manifest.eos_id}"
    name = f"tokenizer {manifest.tokenizer[:16]}" if manifest.tokenizer else "no tokenizer"
    yield f"  vocabulary   {manifest.vocab_size:,}, {end}, {name}"
    yield f"  rejected     {manifest.rejected:,}{' (rejected.jsonl)' if manifest.rejected else ''}"
    yield f"  fingerprint  {manifest.fingerprint}"
    yield f"  entropy      {found.unigram_entropy:.3f} nats per token, of token frequencies alone"
    yield ""
    yield (
        f"tokens per document: min {lengths.min:,}, median {lengths.median:,}, "
        f"mean {lengths.mean:,.1f}, max {lengths.max:,}"
    )
    yield from _chart(lengths.histogram)
    for sample in found.samples:
        yield ""
        yield f"document at token {sample.position:,}:"
        yield f"  {printable(sample.text)}{'' if sample.whole else ' ...'}"


def parts_of(manifest: Manifest) -> str:
    """Return the number of parts in words; "" for a corpus with one."""
    if manifest.streamed_parts == 0:
        return f", {plural(len(manifest.part_ends), 'part')} so far: it is being prepared"
    count = len(manifest.part_ends)
    return f", {plural(count, 'part')}" if count > 1 or manifest.streamed_parts else ""


def printable(text: str) -> str:
    """Escape control characters, newlines included, which could control a terminal.

    >>> printable("a\\n\\x1b[2J")
    'a\\\\n\\\\x1b[2J'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _chart(histogram: tuple[tuple[int, int, int], ...]) -> Iterator[str]:
    most = max(count for _, _, count in histogram)
    for low, high, count in histogram:
        # a non-empty bin always has a bar
        bar = "█" * max(round(_BAR_WIDTH * count / most), 1 if count else 0)
        label = str(low) if high == low + 1 else f"{low:,} to {high - 1:,}"
        yield f"  {label:>22} {bar:<{_BAR_WIDTH}} {count:,}"


def _tokens_per_byte(found: Description) -> float | None:
    text_bytes = found.manifest.text_bytes
    return found.manifest.num_tokens / text_bytes if text_bytes else None
