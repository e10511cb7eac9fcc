"""The output folder's life: fresh, half done, finished; what may be continued and what is deleted."""

import json
from collections import Counter
from pathlib import Path
from typing import Literal

from penstock.core.errors import CorpusChanged, UsageError
from penstock.core.files import remove_tree
from penstock.data import manifest
from penstock.data.prepare import journal, plan
from penstock.data.prepare.plan import Plan, differences
from penstock.data.prepare.shards import shard_files

State = Literal["fresh", "half_done", "finished"]

APPEND_FOLDER = ".append"
"""Inside a corpus; there while something is being appended to it (see append.py)."""


def settle(folder: Path, wanted: Plan) -> State:
    """Return what the folder holds of this plan; a fresh folder gets the plan written into it.

    Raises:
        CorpusChanged: it holds the work of another plan; the message says what differs.
        UsageError: it holds a corpus of unknown origin.
    """
    stored = plan.load_plan(folder)
    if stored is None:
        _refuse_foreign(folder, wanted)
        plan.save_plan(folder, wanted)
        return "fresh"
    finished = (folder / manifest.FILE).is_file() and manifest.load_manifest(folder).streamed_parts != 0
    if found := differences(stored, wanted):
        state = "finished" if finished else "half done"
        shown = "; ".join(found[:5]) + ("; ..." if len(found) > 5 else "")
        fix = "Use --restart to delete that corpus and prepare this one, or another --out."
        raise CorpusChanged(f"{folder} holds a {state} corpus of another plan: {shown}", fix=fix)
    return "finished" if finished else "half_done"


def clear(folder: Path, *, keep: Path | None) -> None:
    """Delete a corpus and its unfinished work; other files in the folder stay.

    Args:
        keep: a file to spare: the given tokenizer may lie in this folder.
    """
    # The manifest goes first and the plan last, so that a kill in between leaves neither a corpus
    # that seems complete nor shards that nobody claims.
    names = (manifest.FILE, journal.FILE, journal.REJECTED_FILE, manifest.TOKENIZER_FILE)
    appended = (*folder.glob("inputs-[0-9]*.jsonl"), *folder.glob("rejected-[0-9]*.jsonl"))
    remove_tree(folder / APPEND_FOLDER)
    for path in (*(folder / name for name in names), *appended, *shard_files(folder), folder / plan.FILE):
        if keep is None or not path.exists() or not path.samefile(keep):
            path.unlink(missing_ok=True)


def remove_strays(folder: Path, *, keep: set[str]) -> None:
    """Delete shards that the journal does not know: written just before a kill, or before that one."""
    for path in shard_files(folder):
        if path.name not in keep:
            path.unlink()


def rejections_by_kind(folder: Path) -> dict[str, int]:
    """Count a folder's listed rejections."""
    path = folder / journal.REJECTED_FILE
    if not path.is_file():
        return {}
    with path.open("rb") as lines:
        return dict(Counter(json.loads(line)["kind"] for line in lines))


def _refuse_foreign(folder: Path, wanted: Plan) -> None:
    ours = [folder / manifest.FILE, *shard_files(folder)]
    if "train-tokenizer" in wanted.options:
        ours.append(folder / manifest.TOKENIZER_FILE)
    if found := [path.name for path in ours if path.exists()]:
        fix = "Use --restart to delete it and prepare this one, or another --out."
        raise UsageError(f"{folder} already holds a corpus of unknown origin ({found[0]})", fix=fix)
