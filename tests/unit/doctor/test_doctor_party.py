"""Nodes that meet at a store: who comes, who is missed, whose turn it is. One process plays all of them."""

from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from penstock.core.errors import PenstockError
from penstock.core.network.nics import Nic
from penstock.doctor.node_group import End, Member, NodeGroup, ends_of, matched

SOON_S = 0.01  # for what will not come
LATE_S = 60.0  # for what is there already


def parties(*nodes: int, expected: int) -> list[NodeGroup]:
    """Nodes of one store; those but the first have said that they are here."""
    store = HashStore()
    made = [
        NodeGroup(store, Member(node=node, host=f"h{node}", ends=()), num_expected=expected) for node in nodes
    ]
    for party in made[1:]:
        party.say(f"here/{party.me.node}", {"node": party.me.node, "host": party.me.host, "ends": []})
    return made


def test_the_leading_node_learns_who_came_and_who_is_missing() -> None:
    first, *_ = parties(0, 2, expected=3)
    first.gather(timeout_s=SOON_S)
    assert [member.node for member in first.members] == [0, 2]
    assert first.missing == [1]


def test_what_nodes_give_is_the_same_for_all_and_lacks_who_fell_silent() -> None:
    first, second, _ = parties(0, 1, 2, expected=3)
    first.gather(timeout_s=LATE_S)
    second.say("colour/1", "blue")
    assert first.exchange("colour", "red", timeout_s=SOON_S) == {0: "red", 1: "blue"}
    assert second.exchange("colour", "blue", timeout_s=LATE_S) == {0: "red", 1: "blue"}


def test_a_node_that_fell_silent_is_not_waited_for_again() -> None:
    first, _ = parties(0, 1, expected=2)
    first.gather(timeout_s=LATE_S)
    assert first.exchange("a", 1, timeout_s=SOON_S) == {0: 1}
    assert first.exchange("b", 2, timeout_s=LATE_S) == {0: 2}  # at once: a test ends before it would


def test_turns_end_when_the_time_is_over_and_the_first_is_always_taken() -> None:
    (alone,) = parties(0, expected=1)
    alone.gather(timeout_s=LATE_S)
    taken: list[int] = []
    assert alone.take_turns(3, taken.append, attempt=0, bound_s=0.0, slow_s=LATE_S) == 1
    assert alone.take_turns(3, taken.append, attempt=1, bound_s=LATE_S, slow_s=LATE_S) == 3
    assert taken == [0, 0, 1, 2]


def test_a_leader_that_is_gone_is_said_with_what_was_waited_for() -> None:
    (_, second) = parties(0, 1, expected=2)
    with pytest.raises(
        PenstockError,
        match=r"node 1 \(h1\) waited 0 s for the others without an answer .*'members'.* See their",
    ):
        second.gather(timeout_s=SOON_S)


def end(name: str, network: str) -> End:
    return End(name=name, address="10.0.0.1", network=network, mtu=1500)


@pytest.mark.parametrize(
    ("mine", "theirs", "facing"),
    [
        (["a", "b"], ["a", "b"], [("0", "0"), ("1", "1")]),
        (["a", "b"], ["b", "a"], [("0", "1"), ("1", "0")]),
        (["a", "b"], ["b"], [("1", "0")]),
        (["x", "y"], ["z"], [("0", "0")]),  # each address in a network of its own, as some clouds have it
        (["a"], [], []),
    ],
)
def test_interfaces_face_those_of_their_network_else_those_of_their_place(
    mine: list[str], theirs: list[str], facing: list[tuple[str, str]]
) -> None:
    ends = [[end(str(i), network) for i, network in enumerate(side)] for side in (mine, theirs)]
    assert [(one.name, other.name) for one, other in matched(*ends)] == facing


def test_one_machine_is_measured_over_its_loopback_and_several_over_what_leads_out() -> None:
    settings: dict[str, Any] = {"is_up": True, "mtu": 9000}
    nics = [Nic(name="eth1", addresses=("10.1.0.2/16",), **settings), Nic(name="eth2", **settings)]
    assert [found.name for found in ends_of(nics, num_nodes=1)] == ["lo"]
    assert ends_of(nics, num_nodes=2) == (
        End(name="eth1", address="10.1.0.2", network="10.1.0.0/16", mtu=9000),
    )
