"""The loader's arguments, checked: what is refused, and with which words."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np

from penstock.core.errors import ConfigError, UsageError, nearest
from penstock.data.collate import FIELDS
from penstock.data.mixture import slots_of
from penstock.data.packing import check_packing
from penstock.data.source import Source
from penstock.data.timeline import MOST_SAMPLES
from penstock.data.types import Batch, Int64


def at_least(least: int, name: str, value: int, *, most: int | None = None) -> int:
    """Return an integer of any kind as a plain one, which JSON can write."""
    whole = whole_number(name, value)
    if whole < least:
        raise ConfigError(f"{name} must be at least {least}", got=whole)
    if most is not None and whole > most:
        raise ConfigError(f"{name} can be at most {most:,}", got=whole)
    return whole


def whole_number(name: str, value: int) -> int:
    """Return an integer of any kind as a plain one."""
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be a whole number", got=value) from None


def number(name: str, value: object) -> float:
    """Return a number of any kind as a plain one, which JSON can write."""
    try:
        if isinstance(value, SupportsFloat):  # which a text is not
            return float(value)
    except (TypeError, OverflowError):
        pass  # an array of several; an integer beyond any float
    raise ConfigError(f"{name} must be a number", got=value)


def check_text(name: str, value: str) -> str:
    """Return a text; a state that holds anything else could not be read again."""
    if not isinstance(value, str):
        raise UsageError(f"{name} must be text", got=value)
    return value


def check_table(name: str, value: Mapping[str, Any], *, example: str) -> dict[str, Any]:  # Any: their own
    """Return a mapping from names, copied."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must map names of corpora to numbers", got=value, fix=f"Write {example}.")
    return dict(value)


def sample_ids(samples: Int64 | Sequence[int]) -> Int64:
    """Return ids of samples [n] as int64, each one that can be."""
    try:
        ids = np.asarray(samples)
    except ValueError:  # lists of different lengths
        ids = np.empty((0, 0))
    whole = ids.ndim == 1 and (not len(ids) or ids.dtype.kind in "iu")
    if not whole or (len(ids) and not 0 <= ids.min() <= ids.max() <= MOST_SAMPLES):
        raise UsageError(
            "Samples must be a list of whole numbers, none of them negative or above 2^62", got=samples
        )
    return ids.astype(np.int64, copy=False)


def check_fields(fields: Sequence[str]) -> tuple[str, ...]:
    """Return the names of fields, each known."""
    if isinstance(fields, str):
        raise ConfigError("fields must be a list of names", got=fields, fix=f"Write ({fields!r},).")
    if not isinstance(fields, Iterable):
        raise ConfigError("fields must be a list of names", got=fields)
    for field in fields:
        if field not in FIELDS:
            raise ConfigError("The loader has no such field", got=field, fix=nearest(field, list(FIELDS)))
    return tuple(fields)


def open_sources(
    corpora: Mapping[str, str | Path], *, rule: str, overlong: str | None, epochs: Mapping[str, int]
) -> dict[str, Source]:
    """Open every corpus of a mixture."""
    if not isinstance(corpora, Mapping):
        raise ConfigError(
            "corpora must map names to folders", got=corpora, fix="Write {'web': 'path/to/corpus'}."
        )
    if not corpora:
        raise ConfigError("The loader needs at least one corpus", fix="Name one: {'web': 'path/to/corpus'}.")
    for name in corpora:
        check_name(name)
    check_packing(rule, overlong)
    for name, cap in check_table("epochs", epochs, example="{'web': 2}").items():
        if name not in corpora:
            raise ConfigError("epochs names no corpus", got=name, fix=nearest(name, list(corpora)))
        at_least(1, f"epochs of corpus {name!r}", cap)
    return {
        name: Source(name, path, rule=rule, max_epochs=epochs.get(name)) for name, path in corpora.items()
    }


def check_name(name: str) -> None:
    """Refuse what cannot name a corpus: keys of a state, which is JSON, are texts."""
    if not (isinstance(name, str) and name):
        raise ConfigError("The name of a corpus must be a text that is not empty", got=name)


def slots_from(weights: Mapping[str, float], names: Sequence[str]) -> dict[str, int]:
    """Turn a weight for every corpus into slots of the mixture, in the order of the corpora."""
    for name in check_table("weights", weights, example="{'web': 0.7, 'code': 0.3}"):
        if name not in names:
            raise ConfigError("weights names no corpus", got=name, fix=nearest(name, list(names)))
    for name in names:
        if name not in weights:
            raise ConfigError(f"Corpus {name!r} has no weight", fix="Give it one; 0 leaves it out.")
        number(f"Weight of corpus {name!r}", weights[name])
    return slots_of({name: weights[name] for name in names})


def delivery(deliver: str) -> Callable[[Batch], dict[str, Any]]:  # Any: tensors or arrays
    """Return what turns a batch into what the loader hands out."""
    if deliver == "numpy":
        return lambda batch: batch.fields
    if deliver not in ("torch", "pinned"):
        raise ConfigError("deliver has no such choice", got=deliver, fix="Known: numpy, pinned, torch.")
    from penstock.data.torch_feed import to_tensors

    return partial(to_tensors, pin_memory=deliver == "pinned")
