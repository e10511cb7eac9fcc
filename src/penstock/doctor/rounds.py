"""Who measures with whom: every pair of nodes once, a node in one pair at a time."""


def rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs, by the circle method: each node meets each other once.

    The first member of a pair is the lower one. With an odd number of nodes, one rests in each round.

    >>> rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    seats: list[int | None] = [*range(num_nodes)]
    if num_nodes % 2:
        seats.append(None)
    half = len(seats) // 2
    found = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found
