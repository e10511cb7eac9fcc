"""`penstock data describe`: a summary of a corpus."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.text import Text

from penstock.cli.data.prepare import learned_lines, learned_of
from penstock.cli.options import CorpusOptions, OutputOptions, add_fields, options_of
from penstock.core.units import mib, parse_count, plural
from penstock.data.corpus.manifest import Manifest
from penstock.data.tools.describe import Description, TextSample, describe

_BAR_WIDTH = 40
_WHOLE_TOKENS = 4096  # of a document that --rows prints

EPILOG = """\
Lengths are exact, over all documents, in tokens with the end token counted; memory stays bounded.

example:
  penstock data describe corpus
  penstock data describe chats --rows 3
  penstock data describe megatron:/data/web_text_document

exit codes: 0 done, 1 no corpus or a damaged one, 2 wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--rows", type=parse_count, metavar="N",
        help="print N documents whole; of conversations, with the learned tokens in colour")  # fmt: skip
    add_fields(parser, CorpusOptions)
    add_fields(parser, OutputOptions)


def run(arguments: argparse.Namespace) -> int:
    """Print the description of a corpus."""
    corpus = options_of(arguments, CorpusOptions).corpus
    if arguments.rows is None:
        found = describe(corpus)
    else:
        found = describe(corpus, num_samples=arguments.rows, sample_tokens=_WHOLE_TOKENS)
    if options_of(arguments, OutputOptions).json:
        print(json.dumps(as_json(found)))
    elif arguments.rows is None or not any(sample.runs for sample in found.samples):
        print("\n".join(as_text(found)))
    else:
        print("\n".join(as_text(replace(found, samples=()))))
        _print_conversations(found.samples, Console(highlight=False, soft_wrap=True))
    return 0


def _print_conversations(samples: Sequence[TextSample], console: Console) -> None:
    """Print conversations with learned tokens in colour, or between marks if there is no colour."""
    colour = console.is_terminal and console.color_system is not None and not console.no_color
    print(f"\nlearned tokens are {'in colour' if colour else 'between [[ and ]]'}:")
    for sample in samples:
        print(f"\ndocument at token {sample.position:,}:")
        line, is_rejected = Text("  "), False
        for kind, written in sample.runs:
            if kind.endswith("-rejected") and not is_rejected:
                is_rejected = True
                line.append("\n  -- the rejected side:\n  ")
            shown = _lines(written)
            if not kind.startswith("learned"):
                line.append(shown)
            elif colour:
                line.append(shown, style="bold red" if is_rejected else "bold green")
            else:
                line.append(f"[[{shown}]]")
        line.append("" if sample.whole else " ...")
        console.print(line)


def _lines(text: str) -> str:
    """Return a text with its line ends kept and indented, and other control characters escaped."""
    return "\n  ".join(printable(line) for line in text.split("\n"))


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
        **learned_of(manifest),
        "unigram_entropy": found.unigram_entropy,
        "document_tokens": {
            "min": lengths.min,
            "median": lengths.median,
            "mean": lengths.mean,
            "max": lengths.max,
            "histogram": [{"from": low, "below": high, "documents": n} for low, high, n in lengths.histogram],
        },
        "samples": [_sample(sample) for sample in found.samples],
    }


def _sample(sample: TextSample) -> dict[str, Any]:  # Any: what JSON can write
    found = {"position": sample.position, "text": sample.text, "whole": sample.whole}
    runs = [{"kind": kind, "text": text} for kind, text in sample.runs]
    return {**found, "runs": runs} if runs else found


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
    yield from learned_lines(manifest)
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
