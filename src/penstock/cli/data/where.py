"""`penstock data where`: the documents in a row of a run."""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.cli.data.describe import printable
from penstock.cli.options import OutputOptions, RunOptions, add_fields, options_of
from penstock.core.errors import UsageError
from penstock.core.files import TOKENIZER_FILE
from penstock.train.inspect.open_run import OpenRun, open_run
from penstock.train.inspect.step_rows import ROW_FIELDS, rows_of_step

_SHOWN = 160

EPILOG = """\
Steps are counted from 1, as in metrics.jsonl; rows from 0, over all processes. A future step is shown as it
will be if nothing is changed until then.

example:
  penstock data where runs/first --step 1200 --row 3

exit codes: 0 done, 1 a corpus or checkpoint cannot be read, 2 unknown run, step or row
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhereOptions:
    """Options of a question about a row."""

    step: int
    """Step, counted from 1."""
    row: int = 0
    """Row of the step, from 0."""
    full: bool = False
    """Print the whole text of each piece."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_fields(parser, RunOptions)
    add_fields(parser, WhereOptions)
    add_fields(parser, OutputOptions, more={"json": ", with the whole text"})


def run(arguments: argparse.Namespace) -> int:
    """Print the documents in a row."""
    options = options_of(arguments, WhereOptions)
    opened = open_run(options_of(arguments, RunOptions).run, fields=ROW_FIELDS)
    found = explained(opened, options.step, options.row)
    if options_of(arguments, OutputOptions).json:
        print(json.dumps(found))
        return 0
    print(f"step {found['step']:,}, row {found['row']} is sample {found['sample']:,}")
    for piece in found["pieces"]:
        for line in _as_text(piece, full=options.full):
            print(line)
    return 0


def explained(opened: OpenRun, step: int, row: int) -> dict[str, Any]:  # Any: JSON values
    """Return a row's sample id and its document fragments with their text."""
    found = rows_of_step(opened, step, first=max(row, 0))
    if row < 0 or not found.rows:
        raise UsageError(f"Step {step:,} has rows 0 to {found.num_rows - 1:,}", got=row)
    (one,) = found.rows
    texts = _texts(opened.folder, [document.ids for document in one.documents])
    pieces = [
        {**asdict(document.span), "epoch": document.span.epoch + 1, "text": text}
        for document, text in zip(one.documents, texts, strict=True)
    ]
    return {"step": step, "row": row, "sample": one.sample, "pieces": pieces}


def _texts(folder: Path, pieces: list[Any]) -> list[str | None]:  # Any: int64 arrays
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return [None] * len(pieces)
    from penstock.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(path)
    return [tokenizer.decode(piece.tolist()) for piece in pieces]


def _as_text(piece: dict[str, Any], *, full: bool) -> list[str]:
    if not piece["corpus"]:
        return [f"  {piece['tokens']:,} tokens of padding"]
    past = piece["offset"] + piece["tokens"]
    lines = [
        f"  {piece['corpus']}:{piece['document']}  tokens {piece['offset']:,} to {past - 1:,} of it, "
        f"epoch {piece['epoch']}, {piece['shard']} from token {piece['start']:,}"
    ]
    if (text := piece["text"]) is not None:
        shown = text if full else text[:_SHOWN]
        lines.append(f"    {printable(shown)}{'' if len(shown) == len(text) else ' ...'}")
    return lines
