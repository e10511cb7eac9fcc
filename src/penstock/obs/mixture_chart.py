"""Draw which corpora a run trained on: shares stacked over tokens, changes of the mixture marked.

Each stretch between two kept records has the exact share of its tokens, so the areas are what was served,
not what was asked for.
"""

from collections.abc import Sequence
from itertools import pairwise

from penstock.core.units import plural
from penstock.obs.areas import Areas, draw_areas
from penstock.obs.axis import Axis, short
from penstock.obs.history import History, MixtureChange, MixturePoint

_MOST_CORPORA = 7
"""Drawn by name, the largest; what is left is one area."""
_OTHERS = "others"
_MOST_MARKS = 100


def mixture_chart(history: History, *, key: str = "mixture", title: str = "Mixture, share of tokens") -> str:
    """Return the chart as an HTML `figure` element; nothing where there was one corpus only."""
    points = (MixturePoint(0, 0, {}), *history.mixture)
    if len(history.corpus_tokens) < 2 or points[-1].tokens <= 0:
        return ""
    names = _names(history)
    return draw_areas(
        Areas(
            key=key,
            title=title,
            description=_described(history, names),
            names=names,
            axis=Axis(low=0, high=float(points[-1].tokens)),
            ends=[point.tokens for point in points],
            steps=[point.step for point in points[1:]],
            shares=[_shares(early, late, names) for early, late in pairwise(points)],
            marks=[
                (change.tokens, f"{change.reason} from step {change.step:,}")
                for change in _thinned(history.mixture_changes)
            ],
        )
    )


def _names(history: History) -> list[str]:
    ordered = sorted(history.corpus_tokens, key=lambda name: (-history.corpus_tokens[name], name))
    if len(ordered) <= _MOST_CORPORA + 1:
        return ordered
    return [*ordered[:_MOST_CORPORA], _OTHERS]


def _shares(early: MixturePoint, late: MixturePoint, names: Sequence[str]) -> list[float]:
    total = max(late.tokens - early.tokens, 1)
    found = [(late.by_corpus.get(name, 0) - early.by_corpus.get(name, 0)) / total for name in names]
    if names[-1] == _OTHERS and _OTHERS not in late.by_corpus:
        found[-1] = 1 - sum(found[:-1])
    return found


def _thinned(changes: Sequence[MixtureChange]) -> Sequence[MixtureChange]:
    """Leave out marks that a chart has no room for: those of a policy come in hundreds."""
    return changes[:: -(-len(changes) // _MOST_MARKS) or 1]


def _described(history: History, names: Sequence[str]) -> str:
    total = max(sum(history.corpus_tokens.values()), 1)
    parts = [
        f"{name} {short(history.corpus_tokens[name] / total, unit='share')}"
        for name in names
        if name in history.corpus_tokens
    ]
    changes = plural(len(history.mixture_changes), "time")
    return f"Of all tokens: {', '.join(parts)}. The mixture changed {changes}."
