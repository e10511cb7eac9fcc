"""`run.start_from`: the model of a recipe from the folder that has its starting weights; no torch.

A folder of a run means its newest checkpoint at the first start; that step is kept in the run's own
config.json, so that the start stays the same while the other run goes on.
"""

import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.find import saved_of
from penstock.checkpoint.layout import INDEX_FILE, name_of
from penstock.checkpoint.start import StartWeights, check_weights, find_start
from penstock.core import config
from penstock.core.config import Raw
from penstock.core.errors import ConfigError, PenstockError
from penstock.obs.metric_names import RECIPE_FILE
from penstock.train.control.requests import job_is_running

ROUNDED_TO = 64
"""A grown vocabulary is rounded up to a multiple of this, so that any usual number of ranks divides it."""


OF_START = frozenset({"ignored_keys"})
"""Keys of [model] that a recipe with run.start_from may have: the others are those of the folder."""

_PINNED = ("start_hash", "start_step", "start_vocab_size")
"""Keys of [run] that describe the starting weights."""


def with_start(raw: Raw) -> Raw:
    """Return a recipe's values with [model] and the identity of the weights filled in from run.start_from.

    A recipe without it is returned as it is.

    Raises:
        ConfigError: there is a [model] too, no such folder, or its weights are not those of `run.start_hash`.
        ModelError, CheckpointError: the folder has no weights that can be opened.
    """
    run, given = raw.get("run"), raw.get("model") or {}
    if not isinstance(run, dict) or not run.get("start_from"):
        if given.get("ignored_keys"):
            raise ConfigError(
                "model.ignored_keys is about the folder of run.start_from, and there is none",
                got=given["ignored_keys"],
                fix="Leave it out, or set run.start_from.",
            )
        return raw
    folder = run["start_from"]
    if not isinstance(folder, str):
        raise ConfigError("run.start_from must be text", got=folder, fix="Write the path in quotes.")
    if given.keys() - OF_START:
        raise ConfigError(
            "run.start_from and [model] are both given, and the model is that of the folder",
            got=folder,
            fix="Remove [model], or run.start_from to train from random weights.",
        )
    ignored = given.get("ignored_keys", [])
    if not isinstance(ignored, list) or not all(isinstance(key, str) for key in ignored):
        fix = 'Write ignored_keys = ["NAME"].'
        raise ConfigError("model.ignored_keys must be a list of texts", got=ignored, fix=fix)
    run = {**run, "start_from": str(Path(folder).absolute())}
    before = _kept(run)
    if before is not None and _is_gone(run, before["run"]):  # its weights are in the run's own checkpoints
        return {**raw, "run": {**run, **_pin(before["run"])}, "model": before["model"]}
    recorded = before["model"].get("ignored_keys", []) if before is not None else []
    start = start_of(run, before, ignored_keys=[*ignored, *recorded])
    known = run.get("start_hash") or start.identity
    if known != start.identity:
        raise ConfigError(
            f"The weights in {start} are not those that run.start_hash names: they are {start.identity}",
            got=known,
            fix="Restore the folder, or remove run.start_hash.",
        )
    step = None if start.saved is None else start.saved.index().meta.step
    pin = {
        "start_hash": start.identity,
        "start_step": step,
        "start_vocab_size": start.model.vocab_size,
    }
    return {**raw, "run": {**run, **pin}, "model": config.dump(start.model)}


def start_of(
    run: Mapping[str, Any],
    before: Mapping[str, Any] | None = None,
    *,
    ignored_keys: Collection[str] = (),
) -> StartWeights:
    """Return the starting weights that a [run] section names.

    Args:
        before: resolved recipe of the previous start of this run, if that had the same folder.
        ignored_keys: unknown keys of the folder's config.json to pass over, with a warning.

    Raises:
        ConfigError: the folder is a run that is still training, and no step of it is named.
        ModelError, CheckpointError: it has an adapter only, or weights that are not those of its config.
    """
    folder, step = Path(run["start_from"]), run.get("start_step")
    if step is None and before is not None:
        step = before["run"].get("start_step")
    if step is None and job_is_running(folder):
        known = [saved.name for saved in saved_of(folder)]
        raise ConfigError(
            f"run.start_from is a run that is still training, with the checkpoints {', '.join(known) or '-'}",
            got=str(folder),
            fix=f"Wait for it, or `penstock export {shlex.quote(str(folder))} --out FOLDER` and start from "
            "FOLDER: its own checkpoints are removed as it trains. run.start_step = N takes one of them.",
        )
    start = find_start(folder, step=step, ignored_keys=ignored_keys)
    check_weights(start)
    return start


def grown(vocab_size: int, *, needed: int) -> int:
    """Return the rows of an embedding of `vocab_size` rows for corpora with `needed` token ids.

    >>> grown(300, needed=300), grown(300, needed=301)
    (300, 320)
    """
    return vocab_size if needed <= vocab_size else -(-needed // ROUNDED_TO) * ROUNDED_TO


def _kept(run: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the resolved recipe of the run's previous start, if it had the same start_from; else None."""
    try:
        kept = config.load_json(Path(str(run.get("dir", ""))) / RECIPE_FILE)
        same = kept["run"]["start_from"] == run["start_from"]
    except (PenstockError, OSError, KeyError, TypeError):
        return None
    return kept if same and isinstance(kept.get("model"), dict) else None


def _is_gone(run: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return True if the starting weights are not there any more: no folder, or a checkpoint that its run
    removed as it went on.
    """
    folder, step = Path(run["start_from"]), before.get("start_step")
    if not folder.is_dir():
        return True
    if step is None or run.get("start_step", step) != step or (folder / INDEX_FILE).is_file():
        return False
    return name_of(step) not in [saved.name for saved in saved_of(folder)]


def _pin(run: Mapping[str, Any]) -> dict[str, Any]:
    return {name: run[name] for name in _PINNED if name in run}
