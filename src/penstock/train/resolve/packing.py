"""`data.packing` of a recipe over conversations: whole rows, or as the run began; no torch.

Other rules cut conversations at the end of a row, and the rest of an answer is then learned without its
question. A run that began with one of them continues with it: the packing is part of the order of its data.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.checkpoint.find import newest_meta, saved_in
from penstock.checkpoint.storage import place_in
from penstock.core import config as configs
from penstock.core.config import Raw
from penstock.core.errors import ConfigError, PenstockError
from penstock.data.corpus.open import holds_conversations
from penstock.data.packing import PACKERS, PADDING_RULES
from penstock.obs.metric_names import RECIPE_FILE

WHOLE = PADDING_RULES[0]
"""Packing of conversations."""


def with_packing(raw: Raw, paths: Mapping[str, str]) -> Raw:
    """Return a recipe's values with the packing of conversations, if a corpus holds some.

    Args:
        paths: corpora by name.

    Raises:
        ConfigError: a new run names a rule that cuts conversations.
    """
    chats = [name for name, path in paths.items() if holds_conversations(path)]
    given = raw["data"].get("packing")
    if not chats or given == WHOLE or (given is not None and given not in PACKERS):
        return raw
    before = _packing_before(raw)
    if given is None:
        return {**raw, "data": {**raw["data"], "packing": before or WHOLE}}
    if before != given:
        raise _cuts(given, chats)
    return raw


def with_usual_packing(raw: Raw) -> Raw:
    """Return a recipe's values with the packing of conversations if it tunes; its corpora are not read."""
    data = raw.get("data")
    if "tune" not in raw or not isinstance(data, dict) or "packing" in data:
        return raw
    return {**raw, "data": {**data, "packing": WHOLE}}


def _packing_before(raw: Raw) -> str | None:
    """Return the packing with which the run began; None: it did not begin yet."""
    run, checkpoint = raw.get("run"), raw.get("checkpoint")
    folder = run.get("dir") if isinstance(run, dict) else None
    if not isinstance(folder, str):
        return None
    with suppress(PenstockError, OSError, KeyError, TypeError):
        return str(configs.load_json(Path(folder) / RECIPE_FILE)["data"]["packing"])
    place = checkpoint.get("dir") if isinstance(checkpoint, dict) else None
    meta = newest_meta(saved_in(place_in(Path(folder), str(place or ""))))
    return None if meta is None else meta.loader.get("packing")


def _cuts(given: object, chats: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"data.packing {given!r} cuts conversations of {', '.join(chats)} at the end of a row: the rest of "
        "an answer is then learned without its question",
        fix="Leave data.packing out. data.overlong = 'drop' or 'truncate' says what becomes of conversations "
        "longer than a row.",
    )
