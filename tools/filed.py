"""Filed results that name their sources: whether they are younger than these."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.core.files import write_atomic

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
_MAX_NAMED = 5


def digests(root: Path, patterns: Sequence[str]) -> dict[str, str]:
    """Return path -> digest of the content, of the files that some patterns name.

    Raises:
        FileNotFoundError: a pattern names no file.
    """
    found = {}
    for pattern in patterns:
        paths = sorted(
            path for path in root.glob(pattern) if path.is_file() and "__pycache__" not in path.parts
        )
        if not paths:
            raise FileNotFoundError(f"no file is named by {pattern!r} : correct or remove the pattern")
        for path in paths:
            found[path.relative_to(root).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found


def newest(folder: Path, name: str) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest result of a name, and its JSON; None if there is none."""
    paths = sorted(folder.glob(f"{name}-????-??-??.json"))
    return (paths[-1], json.loads(paths[-1].read_text())) if paths else None


def changed(filed: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the files that changed, came or went since a result was filed.

    >>> changed({"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "1"})
    ['b', 'c', 'd']
    """
    return sorted(path for path in {*filed, *now} if filed.get(path) != now.get(path))


def complaint(folder: Path, name: str, now: Mapping[str, str], target: str) -> str:
    """Return what is wrong with the newest result of a name; empty if it is young enough.

    Args:
        target: of make, that files it again.
    """
    found = newest(folder, name)
    if found is None:
        return f"There is no {folder / name}-DATE.json. File one: make {target}."
    path, result = found
    stale = changed(result.get("sources", {}), now)
    if not stale:
        return ""
    more = f" and {len(stale) - _MAX_NAMED} more" if len(stale) > _MAX_NAMED else ""
    named = ", ".join(stale[:_MAX_NAMED]) + more
    return f"{path} is older than {named}. File it again: make {target}."


def file(folder: Path, stem: str, result: Mapping[str, Any], page: str = "") -> Path:
    """Write JSON, and a page if there is one; remove earlier ones of the name; return the JSON."""
    path = folder / f"{stem}.json"
    name = stem[: -len("-2026-11-28")]
    for suffix in ("json", "md"):
        for old in folder.glob(f"{name}-????-??-??.{suffix}"):
            old.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(result, indent=1) + "\n")
    if page:
        write_atomic(path.with_suffix(".md"), page)
    return path
