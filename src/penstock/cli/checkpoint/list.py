"""`penstock checkpoint list`: the checkpoints from which a run can resume."""

import argparse
import json
from typing import Any

from penstock.checkpoint.find import SavedCheckpoint, saved_at
from penstock.core.errors import CheckpointError
from penstock.core.units import mib

EPILOG = """\
Reads the index of each checkpoint, not its tensors; `penstock checkpoint verify` reads those.

example:
  penstock checkpoint list runs/first
  penstock checkpoint list runs/first --json

exit codes: 0 there are some, 1 there are none or an index cannot be read, 2 wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: there are no more options."""
    del parser


def run(arguments: argparse.Namespace) -> int:
    """List; return the exit code."""
    rows = [_row(saved) for saved in saved_at(arguments.run)]
    if arguments.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(_line(row))
        if not rows:
            print(f"{arguments.run} has no complete checkpoint.")
    return 1 if not rows or any(row["problem"] for row in rows) else 0


def _row(saved: SavedCheckpoint) -> dict[str, Any]:  # Any: JSON values
    row: dict[str, Any] = {"name": saved.name, "path": str(saved), "problem": ""}
    try:
        index = saved.index()
    except CheckpointError as error:
        return {**row, "problem": str(error)}
    meta = index.meta
    row |= {"step": meta.step, "tokens": meta.tokens, "saved_at": meta.saved_at, "ranks": meta.world_size}
    return {**row, "bytes": index.num_bytes, "files": len(index.files)}


def _line(row: dict[str, Any]) -> str:
    if row["problem"]:
        return f"{row['name']}  {row['problem']}"
    ranks = f"{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}"
    return f"{row['name']}  {row['saved_at']}  {row['tokens']:,} tokens  {mib(row['bytes'])}  {ranks}"
