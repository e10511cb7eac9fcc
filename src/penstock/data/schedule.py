"""Changes that are planned from the start: checked, and put into a timeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.core.errors import ConfigError
from penstock.data.arguments import at_least, check_table, slots_from
from penstock.data.timeline import MOST_LENGTH, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change that is planned from the start; what is None stays as it is."""

    step: int
    """First step it holds for."""
    weights: Mapping[str, float] | None = None
    """Of every corpus."""
    global_batch_size: int | None = None
    """Rows per step over all ranks."""
    sequence_length: int | None = None
    """Tokens per row."""


def checked(schedule: Sequence[Change], names: Sequence[str]) -> tuple[Change, ...]:
    """Return the changes in the order of steps, their numbers plain.

    Raises:
        ConfigError: a number is out of range, or a weight is missing or names no corpus.
    """
    changes = []
    if not isinstance(schedule, Sequence) or not all(isinstance(change, Change) for change in schedule):
        raise ConfigError(
            "schedule must be a list of changes", got=schedule, fix="Write [Change(step=1000, weights=...)]."
        )
    for change in schedule:
        size, length = change.global_batch_size, change.sequence_length
        plain = replace(
            change,
            step=at_least(0, "step of a change", change.step),
            weights=None
            if change.weights is None
            else check_table("weights", change.weights, example="{'web': 1}"),
            global_batch_size=None if size is None else at_least(1, "global_batch_size", size),
            sequence_length=None
            if length is None
            else at_least(2, "sequence_length", length, most=MOST_LENGTH),
        )
        if plain.weights is not None:
            slots_from(plain.weights, names)
        changes.append(plain)
    return tuple(sorted(changes, key=lambda change: change.step))


def planned(timeline: Timeline, changes: Sequence[Change], names: Sequence[str]) -> Timeline:
    """Return a timeline with changes.

    Args:
        names: of the corpora. One that a change has no weight for is left out from there on: it was added
            after the change was planned.
    """
    for change in changes:
        if change.weights is not None:
            weights = {**dict.fromkeys(names, 0.0), **change.weights}
            timeline = timeline.with_slots(change.step, slots_from(weights, names), "schedule")
        if change.global_batch_size is not None:
            timeline = timeline.with_batch_size(change.step, change.global_batch_size)
        if change.sequence_length is not None:
            timeline = timeline.with_length(change.step, change.sequence_length)
    return timeline


def planned_for(changes: Sequence[Change], step: int) -> list[list[Any]]:  # Any: JSON values
    """Return what is planned for exactly one step, as JSON values."""
    return [
        [
            change.weights and {n: float(w) for n, w in change.weights.items()},
            change.global_batch_size,
            change.sequence_length,
        ]
        for change in changes
        if change.step == step
    ]
