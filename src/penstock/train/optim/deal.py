"""Who works on which matrix: even shares of work, the same on every rank; imports no torch."""

from collections.abc import Sequence


def deal(costs: Sequence[float], *, num_owners: int) -> list[int]:
    """Return the owner of each item: the dearest first, each to the one who has least so far.

    The dearest share is at most 4/3 of the best possible (Graham, SIAM J. Appl. Math. 1969).

    >>> deal([5, 1, 4, 2], num_owners=2)
    [0, 0, 1, 1]
    """
    totals, owners = [0.0] * num_owners, [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = totals.index(min(totals))
        owners[item] = owner
        totals[owner] += costs[item]
    return owners
