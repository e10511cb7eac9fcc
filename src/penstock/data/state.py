"""The loader's whole state: a few integers, the same on every rank, under 4 KB.

Positions, not payloads: nothing that was read is saved, because sample k can be computed again. The state
holds how far the run is, what it was told on the way (see timeline.py), what the loader that saved it was
asked for, and what must be the same for the order to be: seed, packing, split, corpora.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard

from penstock.core.errors import StateMismatch
from penstock.data.mix_text import packed, unpacked
from penstock.data.timeline import MOST_LENGTH, MOST_SAMPLES, Skip, Timeline

VERSIONS = (2, 3)
"""A state has the oldest version that can read it: 3 where mixtures are packed (see mix_text.py)."""

_LISTED_MIXTURES = 16  # more are packed

State = dict[str, Any]  # Any: JSON values


@dataclass(frozen=True, slots=True)
class Saved:
    """A state, checked and read."""

    step: int
    """Batches handed to the training loop."""
    timeline: Timeline
    """What was in effect up to then."""
    asked: Mapping[str, Any]
    """Settings of the loader that saved it: one that asks for others changes them from here on."""
    identity: Mapping[str, Any]
    """Seed, packing, split, longest; what must match."""
    corpora: Mapping[str, Mapping[str, Any]]
    """By name, what each corpus was."""


def encode(saved: Saved) -> State:
    """Return a state as JSON values."""
    timeline = saved.timeline.until(saved.step + 1)
    # Pairs and not a table: the order of the corpora lays the pattern out, and must survive sorted keys.
    mix: object = [
        [step, [list(pair) for pair in slots.items()], reason] for step, slots, reason in timeline.mix
    ]
    many = len(timeline.mix) > _LISTED_MIXTURES
    return {
        "v": VERSIONS[many],
        "step": saved.step,
        "samples": timeline.consumed_before(saved.step),
        "batch": [list(entry) for entry in timeline.batch],
        "length": [list(entry) for entry in timeline.length],
        "mix": packed(timeline.mix) if many else mix,
        "skip": [[skip.start, skip.stop, skip.reason] for skip in timeline.skips],
        "grown": [list(entry) for entry in timeline.grown],
        "asked": deepcopy(dict(saved.asked)),
        **deepcopy(dict(saved.identity)),
        "corpora": {name: dict(corpus) for name, corpus in saved.corpora.items()},
    }


def decode(state: State) -> Saved:
    """Read a state; refuse one that no loader can have saved: it would serve other samples in silence.

    Raises:
        StateMismatch: another version, or no state.
    """
    if not isinstance(state, dict):
        raise damaged("it is not a dict", got=type(state).__name__)
    if state.get("v") not in VERSIONS:
        both = " and ".join(map(str, VERSIONS))
        raise StateMismatch("The loader state has another version", got=state.get("v"), fix=f"Known: {both}.")
    timeline = Timeline(
        batch=_entries(state, "batch"),
        length=_entries(state, "length"),
        mix=_mix(state),
        skips=_skips(state),
        grown=_grown(state),
    )
    step, samples = state.get("step"), state.get("samples")
    if not _is_count(step):
        raise damaged("step must be a whole number, zero or more", got=step)
    made = timeline.consumed_before(step)
    if not _is_count(samples) or samples != made:
        raise damaged(f"its step and batch sizes make {made} samples", got=samples)
    for key in ("asked", "corpora"):
        if not isinstance(state.get(key), dict):
            raise damaged(f"{key} must be a table", got=state.get(key))
    corpora = state["corpora"]
    if not all(isinstance(corpus, dict) and _is_corpus(corpus) for corpus in corpora.values()):
        raise damaged("corpora must name each corpus with its parts and fingerprint", got=corpora)
    known = {name for _, slots, _ in timeline.mix for name in slots} | {name for _, name, _ in timeline.grown}
    if unknown := known - set(corpora):
        raise damaged("its mixture names a corpus it does not describe", got=sorted(unknown))
    taken = {"v", "step", "samples", "batch", "length", "mix", "skip", "grown", "asked", "corpora"}
    identity = {key: value for key, value in state.items() if key not in taken}
    return Saved(step, timeline, state["asked"], identity, corpora)


def damaged(what: str, *, got: object) -> StateMismatch:
    """Return the error of a state that cannot be one."""
    return StateMismatch(f"The loader state is damaged: {what}", got=got, fix="Use another checkpoint.")


def _entries(state: State, key: str) -> tuple[tuple[int, int], ...]:
    entries = state.get(key)
    if not (isinstance(entries, list | tuple) and entries and all(map(_is_entry, entries))):
        raise damaged(f"{key} must list pairs of a first step and a size of 1 or more", got=entries)
    _check_rising(key, [first for first, _ in entries])
    if key == "length" and max(size for _, size in entries) > MOST_LENGTH:
        raise damaged(f"a length can be at most {MOST_LENGTH:,}", got=entries)
    return tuple((first, size) for first, size in entries)


def _mix(state: State) -> tuple[tuple[int, dict[str, int], str], ...]:
    entries = state.get("mix")
    if isinstance(entries, dict):
        try:
            entries = unpacked(entries)
        except ValueError as error:
            raise damaged(f"mix cannot be unpacked: {error}", got=entries) from None
    if not (isinstance(entries, list | tuple) and entries and all(map(_is_mix_entry, entries))):
        raise damaged(
            "mix must list a first step, pairs of a corpus and its slots, and a reason", got=entries
        )
    _check_rising("mix", [first for first, _, _ in entries])
    return tuple((first, dict(slots), reason) for first, slots, reason in entries)


def _skips(state: State) -> tuple[Skip, ...]:
    entries = state.get("skip")
    if not (isinstance(entries, list | tuple) and all(map(_is_skip, entries))):
        raise damaged("skip must list a first sample, a last one and a reason", got=entries)
    if any(early[1] > late[0] for early, late in pairwise(entries)):
        raise damaged("the ranges in skip must ascend", got=entries)
    return tuple(Skip(*entry) for entry in entries)


def _grown(state: State) -> tuple[tuple[int, str, int], ...]:
    entries = state.get("grown")
    if not (isinstance(entries, list | tuple) and all(map(_is_growth, entries))):
        raise damaged("grown must list a first step, a corpus and its parts", got=entries)
    if any(early[0] > late[0] for early, late in pairwise(entries)):
        raise damaged("the steps in grown must ascend", got=entries)
    return tuple((step, name, parts) for step, name, parts in entries)


def _check_rising(key: str, firsts: list[int]) -> None:
    if firsts[0] != 0 or any(early >= late for early, late in pairwise(firsts)):
        raise damaged(f"the first steps in {key} must ascend from 0", got=firsts)


def _is_entry(entry: object) -> bool:
    return isinstance(entry, list | tuple) and len(entry) == 2 and all(map(_is_count, entry)) and entry[1] > 0


def _is_mix_entry(entry: object) -> bool:
    if not (isinstance(entry, list | tuple) and len(entry) == 3 and _is_count(entry[0])):
        return False
    slots, reason = entry[1], entry[2]
    if not (isinstance(slots, list | tuple) and all(map(_is_share, slots)) and isinstance(reason, str)):
        return False
    return len({name for name, _ in slots}) == len(slots) and 0 < sum(n for _, n in slots) <= 2**17


def _is_share(pair: object) -> bool:
    return (
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) and _is_count(pair[1])
    )


def _is_skip(entry: object) -> bool:
    return (
        isinstance(entry, list | tuple)
        and len(entry) == 3
        and all(map(_is_count, entry[:2]))
        and entry[0] < entry[1]
        and isinstance(entry[2], str)
    )


def _is_growth(entry: object) -> bool:
    return (
        isinstance(entry, list | tuple)
        and len(entry) == 3
        and _is_count(entry[0])
        and isinstance(entry[1], str)
        and _is_count(entry[2])
    )


def _is_corpus(corpus: Mapping[str, object]) -> bool:
    return _is_count(corpus.get("parts")) and isinstance(corpus.get("fingerprint"), str)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_SAMPLES
