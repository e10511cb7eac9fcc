"""The loader's whole state: a few integers, the same on every rank, under 4 KB.

Positions, not payloads: nothing that was read is saved, because sample k can be computed again. The
identity part (seed, sequence length, packing, mixture, corpora) must match when a state is loaded;
the progress part (step, samples, batch sizes) is what loading restores.
"""

from bisect import bisect_right
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard

from penstock.core.errors import CorpusChanged, StateMismatch

VERSION = 1
_MOST = 2**62  # what sample arithmetic in int64 can hold

State = dict[str, Any]  # Any: JSON values


@dataclass(slots=True)
class Progress:
    """Where a run is, and which batch sizes brought it there."""

    step: int
    """Batches handed to the training loop."""
    samples: int
    """Samples in them, over all ranks."""
    batch: list[tuple[int, int]]
    """(first step, global batch size), ascending; the last holds for all steps to come."""

    def samples_at(self, step: int) -> tuple[int, int]:
        """Return the first sample of a step and the step's global batch size."""
        first = 0
        index = bisect_right(self.batch, step, key=lambda entry: entry[0]) - 1
        for (start, size), (stop, _) in zip(self.batch[:index], self.batch[1 : index + 1], strict=True):
            first += (stop - start) * size
        start, size = self.batch[index]
        return first + (step - start) * size, size

    def with_batch_size(self, size: int) -> "Progress":
        """Return the same progress with another batch size from the next step on."""
        past = [entry for entry in self.batch if entry[0] < self.step]
        last = past[-1][1] if past else None
        batch = past if size == last else [*past, (self.step, size)]
        return Progress(self.step, self.samples, batch)


def encode(progress: Progress, identity: Mapping[str, Any]) -> State:
    """Return the state as JSON values."""
    return {
        "v": VERSION,
        "step": progress.step,
        "samples": progress.samples,
        "batch": [list(entry) for entry in progress.batch],
        **deepcopy(dict(identity)),
    }


def decode(state: State, identity: Mapping[str, Any]) -> Progress:
    """Check that a state belongs to a loader of this identity; return its progress.

    Raises:
        StateMismatch: another version, seed, sequence length, packing, split or mixture; or no state.
        CorpusChanged: a corpus's contents differ.
    """
    if not isinstance(state, dict):
        raise _damaged("it is not a dict", got=type(state).__name__)
    if state.get("v") != VERSION:
        raise StateMismatch(
            "The loader state has another version", got=state.get("v"), fix=f"Known: {VERSION}."
        )
    progress = _read_progress(state)
    try:
        _check_corpora(state["corpora"], identity["corpora"])
    except (KeyError, TypeError, AttributeError):
        raise _damaged(
            "corpora must name each corpus with its fingerprint", got=state.get("corpora")
        ) from None
    for key, ours in identity.items():
        if state.get(key) != ours:
            raise StateMismatch(
                f"The loader state has {key} = {state.get(key)!r}, this loader has {ours!r}",
                fix="Resume with the settings of the saved run, or start a new run.",
            )
    return progress


def _read_progress(state: State) -> Progress:
    """Refuse a position that no loader can have reached: it would serve other samples in silence."""
    batch = state.get("batch")
    if not (isinstance(batch, list | tuple) and batch and all(map(_is_batch_entry, batch))):
        raise _damaged("batch must list pairs of a first step and a batch size of 1 or more", got=batch)
    firsts = [first for first, _ in batch]
    if firsts[0] != 0 or any(early >= late for early, late in pairwise(firsts)):
        raise _damaged("the first steps in batch must ascend from 0", got=batch)
    step, samples = state.get("step"), state.get("samples")
    if not _is_count(step):
        raise _damaged("step must be a whole number, zero or more", got=step)
    progress = Progress(step, 0, [(first, size) for first, size in batch])
    progress.samples = progress.samples_at(step)[0]
    if not _is_count(samples) or samples != progress.samples:
        raise _damaged(f"its step and batch sizes make {progress.samples} samples", got=samples)
    return progress


def _is_batch_entry(entry: object) -> bool:
    return isinstance(entry, list | tuple) and len(entry) == 2 and all(map(_is_count, entry)) and entry[1] > 0


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _damaged(what: str, *, got: object) -> StateMismatch:
    return StateMismatch(f"The loader state is damaged: {what}", got=got, fix="Use another checkpoint.")


def _check_corpora(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse other contents under the same name; sizes that follow from settings are not contents."""
    for name in saved.keys() & ours.keys():
        was, found = saved[name], ours[name]
        if was["fingerprint"] != found["fingerprint"]:
            changes = "; ".join(f"{k} was {was[k]}, is {found.get(k)}" for k in was if was[k] != found.get(k))
            raise CorpusChanged(
                f"Corpus {name!r} is not the one the state was saved with: {changes}",
                fix="Restore the corpus, or start a new run.",
            )
