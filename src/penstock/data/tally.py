"""How much the steps before a step took from each corpus."""

from collections import Counter

from penstock.data.course import Course


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
