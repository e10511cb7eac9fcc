"""How much the steps before a step took from each corpus, and what changes of the length cut anew."""

from collections import Counter
from dataclasses import dataclass

from penstock.data.course import Course
from penstock.data.types import Waste


def samples_by_corpus(course: Course, step: int) -> dict[str, int]:
    """Return how many samples the steps before a step take from each corpus."""
    first = course.timeline.first_sample(step)
    counts = Counter(course.counts(first))
    for skip in course.timeline.skips:
        if skip.start < first:
            counts.subtract(course.counts(min(first, skip.stop)))
            counts.update(course.counts(skip.start))
    return {name: counts[name] for name in course.names}


def tokens_by_corpus(course: Course, step: int) -> dict[str, int]:
    """Return how many tokens, padding counted, the steps before a step take from each corpus."""
    lengths = [entry for entry in course.timeline.lengths if entry[0] < step]
    edges = [*(start for start, _ in lengths), step]
    counts = [samples_by_corpus(course, edge) for edge in edges]
    tokens = Counter[str]()
    for (_, length), early, late in zip(lengths, counts, counts[1:], strict=False):
        tokens.update({name: (late[name] - early[name]) * length for name in late})
    return {name: tokens[name] for name in course.names}


def waste_by_corpus(course: Course, step: int) -> dict[str, Waste]:
    """Return what the steps before a step waste of each corpus that is here."""
    first = course.timeline.first_sample(step)
    wasted = course.waste(first)
    for skip in course.timeline.skips:
        if skip.start < first:
            start, stop = course.waste(skip.start), course.waste(min(first, skip.stop))
            wasted = {name: of - (stop[name] - start[name]) for name, of in wasted.items()}
    return wasted


@dataclass(frozen=True, slots=True, kw_only=True)
class Recut:
    """What a change of the sequence length did to one corpus."""

    rows: int
    """Rows of the new length that what was left of the pools under way makes."""
    tokens: int
    """Tokens in them."""
    padding: int
    """Positions in them that hold no token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthChange:
    """A change of the sequence length; pools that no row was taken from yet are not counted."""

    step: int
    """First step of the new length."""
    before: int
    """Tokens per row."""
    after: int
    """Tokens per row from that step on."""
    corpora: dict[str, Recut]
    """By name, of the corpora that an epoch was under way of."""


def length_changes(course: Course, step: int) -> list[LengthChange]:
    """Return the changes of length up to a step, with what each cut anew."""
    lengths = course.timeline.lengths
    changes = []
    for phase, (start, after) in enumerate(lengths):
        if phase and start <= step:
            corpora = {
                name: Recut(rows=rows, tokens=rows * after - padding, padding=padding)
                for name, (rows, padding) in course.recut(phase).items()
            }
            before = lengths[phase - 1][1]
            changes.append(LengthChange(step=start, before=before, after=after, corpora=corpora))
    return changes
