"""The loader's arguments, checked: what is refused, and with which words."""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, nearest
from penstock.data.collate import FIELDS
from penstock.data.mixture import slots_of
from penstock.data.packing import PACKERS
from penstock.data.source import Source
from penstock.data.types import Batch


def at_least(least: int, name: str, value: int) -> int:
    """Return an integer of any kind as a plain one, which JSON can write."""
    try:
        whole = operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be a whole number", got=value) from None
    if whole < least:
        raise ConfigError(f"{name} must be at least {least}", got=whole)
    return whole


def check_fields(fields: Sequence[str]) -> tuple[str, ...]:
    """Return the names of fields, each known."""
    if isinstance(fields, str):
        raise ConfigError("fields must be a list of names", got=fields, fix=f"Write ({fields!r},).")
    for field in fields:
        if field not in FIELDS:
            raise ConfigError("The loader has no such field", got=field, fix=nearest(field, list(FIELDS)))
    return tuple(fields)


def open_sources(
    corpora: Mapping[str, str | Path], *, rule: str, epochs: Mapping[str, int]
) -> dict[str, Source]:
    """Open every corpus of a mixture."""
    if not isinstance(corpora, Mapping):
        raise ConfigError(
            "corpora must map names to folders", got=corpora, fix="Write {'web': 'path/to/corpus'}."
        )
    if not corpora:
        raise ConfigError("The loader needs at least one corpus", fix="Name one: {'web': 'path/to/corpus'}.")
    PACKERS[rule]  # an unknown rule is refused here, not at the first batch
    for name, cap in epochs.items():
        if name not in corpora:
            raise ConfigError("epochs names no corpus", got=name, fix=nearest(name, list(corpora)))
        if cap < 1:
            raise ConfigError(f"epochs of corpus {name!r} must be at least 1", got=cap)
    return {
        name: Source(name, path, rule=rule, max_epochs=epochs.get(name)) for name, path in corpora.items()
    }


def slots_from(weights: Mapping[str, float], names: Sequence[str]) -> dict[str, int]:
    """Turn a weight for every corpus into slots of the mixture, in the order of the corpora."""
    for name in weights:
        if name not in names:
            raise ConfigError("weights names no corpus", got=name, fix=nearest(name, list(names)))
    for name in names:
        if name not in weights:
            raise ConfigError(f"Corpus {name!r} has no weight", fix="Give it one; 0 leaves it out.")
    return slots_of({name: weights[name] for name in names})


def delivery(deliver: str) -> Callable[[Batch], dict[str, Any]]:  # Any: tensors or arrays
    """Return what turns a batch into what the loader hands out."""
    if deliver == "numpy":
        return lambda batch: batch.fields
    if deliver not in ("torch", "pinned"):
        raise ConfigError("deliver has no such choice", got=deliver, fix="Known: numpy, pinned, torch.")
    from penstock.data.torch_feed import to_tensors

    return partial(to_tensors, pin_memory=deliver == "pinned")
