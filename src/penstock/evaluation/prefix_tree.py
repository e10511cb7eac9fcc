"""Tree of common prefixes: which parts of prompts are computed first, so that others find them in the cache.

    [examples]                     computed once
        [question 1]               once
            choice a, b, c, d      each alone, behind the blocks of question 1
        [question 2]
            ...

The prefix cache holds whole blocks of finished requests. So a node ends at a multiple of the block size, and
its children are requested when it is done. Prompts in sorted order have their longest common prefixes with
their neighbours, which gives the tree in one pass over them (as the intervals of a suffix array do:
Abouelhoda et al., 2004).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint32]


@dataclass(slots=True, kw_only=True)
class Node:
    """A prefix that several prompts have in common."""

    prompt: int
    """Index of one of these prompts."""
    num_tokens: int
    """Length of the prefix, a multiple of the block size."""
    children: "list[Node | int]" = field(default_factory=list)
    """Longer common prefixes, and indices of prompts."""


def tree_of(prompts: Sequence[Tokens], shareable: Sequence[int], *, block_size: int) -> "list[Node | int]":
    """Return the roots of the tree: each prompt is in it once, by index.

    Args:
        shareable: tokens of each prompt that may come from the cache, from the start.

    >>> first, second = np.array([1, 2, 3, 4, 5], np.uint32), np.array([1, 2, 3, 9, 5], np.uint32)
    >>> tree_of([first, second, second[3:]], [4, 4, 1], block_size=2)
    [Node(prompt=0, num_tokens=2, children=[0, 1]), 2]
    """
    if not prompts:
        return []
    order = sorted(range(len(prompts)), key=lambda index: prompts[index].astype(">u4").tobytes())
    open_nodes = [Node(prompt=order[0], num_tokens=0)]  # from the root down, ever longer
    before = order[0]
    for index in order[1:]:
        common = _common(prompts[before], prompts[index], most=min(shareable[before], shareable[index]))
        _put(open_nodes, before, common // block_size * block_size)
        before = index
    _put(open_nodes, before, 0)
    return open_nodes[0].children


def _put(open_nodes: list[Node], prompt: int, num_tokens: int) -> None:
    """Put a prompt into its node; close those that its successor, with `num_tokens` in common, is not in."""
    item: Node | int = prompt
    while open_nodes[-1].num_tokens > num_tokens:
        node = open_nodes.pop()
        node.children.append(item)
        item = node
    if open_nodes[-1].num_tokens < num_tokens:
        open_nodes.append(Node(prompt=prompt, num_tokens=num_tokens))
    open_nodes[-1].children.append(item)


def _common(a: Tokens, b: Tokens, *, most: int) -> int:
    """Return the length of the common prefix, at most `most`."""
    differ = np.flatnonzero(a[:most] != b[:most])
    return int(differ[0]) if len(differ) else most
