"""Laws of the tree of common prefixes: every prompt once, and a parent's tokens begin its children's."""

from itertools import takewhile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.evaluation.prefix_tree import Node, tree_of

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=12)


def members(items):
    """Yield the prompts of a tree in its order."""
    for item in items:
        if isinstance(item, Node):
            yield from members(item.children)
        else:
            yield item


def common(a, b):
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def check(items, prompts, shareable, before):
    for item in items:
        index = item.prompt if isinstance(item, Node) else item
        assert prompts[index][: len(before)] == before
        assert shareable[index] >= len(before)
        if isinstance(item, Node):
            assert item.num_tokens > len(before)
            assert len(item.children) > 1
            check(item.children, prompts, shareable, prompts[index][: item.num_tokens])


@given(prompts=prompts, block_size=st.integers(1, 3), data=st.data())
def test_every_prompt_is_in_the_tree_once_below_its_own_prefixes(prompts, block_size, data):
    shareable = [data.draw(st.integers(0, len(prompt) - 1)) for prompt in prompts]
    arrays = [np.array(prompt, np.uint32) for prompt in prompts]
    roots = tree_of(arrays, shareable, block_size=block_size)
    assert sorted(members(roots)) == list(range(len(prompts)))
    check(roots, prompts, shareable, [])


@given(prompts=prompts, block_size=st.integers(1, 3))
def test_the_longest_common_prefix_of_two_prompts_is_computed_once(prompts, block_size):
    arrays = [np.array(prompt, np.uint32) for prompt in prompts]
    roots = tree_of(arrays, [len(prompt) for prompt in prompts], block_size=block_size)
    depths = {}

    def walk(items, nodes):
        for item in items:
            if isinstance(item, Node):
                walk(item.children, [*nodes, item])
            else:
                depths[item] = nodes

    walk(roots, [])
    for a, one in enumerate(prompts):
        for b, other in enumerate(prompts[:a]):
            shared = [node.num_tokens for node in depths[a] if node in depths[b]]
            assert max(shared, default=0) >= common(one, other) // block_size * block_size
