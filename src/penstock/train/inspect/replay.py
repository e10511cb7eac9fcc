"""Replay: writes the batches of some steps of a run to files that other programs can read; no torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import UsageError
from penstock.core.files import commit, remove_tree, temporary_beside, write_json
from penstock.train.inspect.open_run import OpenRun

FIELDS = ("input_ids", "labels", "position_ids", "cu_seqlens")
INDEX_FILE = "replay.json"


def replay(
    opened: OpenRun, steps: range, out: Path, *, progress: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:  # Any: JSON values
    """Write steps, counted from 1, and an index of them, atomically; return the index's entries.

    Args:
        opened: opened with FIELDS.
        progress: called after each step.

    Raises:
        UsageError: the folder is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is not a new or empty folder", fix="Name another one with --out.")
    building = temporary_beside(out)
    remove_tree(building)  # left by an interrupted replay
    building.mkdir(parents=True)
    written = []
    for step in steps:
        batch = opened.loader.gather(opened.loader.samples_of(step - 1))  # in the order of `where` and `find`
        name = f"step-{step:08d}.npz"
        with (building / name).open("wb") as file:
            np.savez(file, **{field: batch[field] for field in ("sample_ids", *FIELDS)})
        rows, length = batch["input_ids"].shape
        written.append(
            {
                "step": step,
                "file": name,
                "rows": rows,
                "sequence_length": length,
                "sample_ids": batch["sample_ids"].tolist(),
            }
        )
        progress()
    index = {"run": str(opened.folder.resolve()), "state": opened.loader.state_dict(), "steps": written}
    write_json(building / INDEX_FILE, index)
    commit(building, out)
    return written
