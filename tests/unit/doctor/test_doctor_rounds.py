from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.doctor.node_group import rounds
from penstock.doctor.path_mtu import largest


@given(st.integers(2, 40))
def test_each_node_meets_each_other_once_and_one_at_a_time(nodes: int) -> None:
    turns = rounds(nodes)
    assert all(max(Counter(node for pair in turn for node in pair).values()) == 1 for turn in turns)
    pairs = [pair for turn in turns for pair in turn]
    assert sorted(pairs) == [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    assert len(turns) <= nodes


@given(most=st.integers(577, 65_535), passing=st.integers(0, 65_535))
def test_the_largest_packet_that_arrives_is_found(most: int, passing: int) -> None:
    asked: list[int] = []

    def arrives(size: int) -> bool:
        asked.append(size)
        return size <= passing

    assert largest(arrives, max_bytes=most) == (0 if passing < 576 else min(passing, most))
    assert len(asked) <= 18
