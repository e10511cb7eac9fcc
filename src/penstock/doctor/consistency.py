"""Consistency check: versions, devices and cores that should be equal on all nodes. Pure functions."""

from collections.abc import Iterator, Mapping

from penstock.doctor.checks.check import Finding, red, yellow

CHECK = "sameness"

_MUST = ("torch", "devices", "python")
"""Traits whose difference ends a run, or lets ranks compute different values."""


def judge_sameness(traits: Mapping[int, Mapping[str, str]]) -> Iterator[Finding]:
    """Yield findings on traits that differ between nodes.

    Args:
        traits: node -> trait -> value. A trait that a node lacks is not compared.


    >>> [f.what for f in judge_sameness({0: {"torch": "2.13"}, 1: {"torch": "2.11"}})]
    ['torch differs: 2.11 on node 1; 2.13 on node 0']
    """
    for name in sorted({name for values in traits.values() for name in values}):
        nodes: dict[str, list[int]] = {}
        for node, values in traits.items():
            if name in values:
                nodes.setdefault(values[name], []).append(node)
        if len(nodes) > 1:
            rarest = sorted(nodes.items(), key=lambda item: (len(item[1]), item[0]))
            listed = "; ".join(f"{value} on {_nodes(where)}" for value, where in rarest)
            level = red if name in _MUST else yellow
            yield level(f"{name} differs: {listed}", remedy="Use machines and images of one kind.")


def _nodes(numbers: list[int]) -> str:
    """Return a text for nodes, numbering only a few.

    >>> _nodes([3]), _nodes([0, 1]), _nodes([*range(9)])
    ('node 3', 'nodes 0, 1', '9 nodes')
    """
    if len(numbers) > 4:
        return f"{len(numbers)} nodes"
    return f"node{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
