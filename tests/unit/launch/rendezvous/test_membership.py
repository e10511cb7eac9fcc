"""Laws of the membership: whatever nodes do, and in which order, a round is the same for all its members."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from penstock.launch.rendezvous.membership import Entry, Membership, NodeOffer, View
from tests.examples import examples

LAST_CALL_S, LOST_AFTER_S = 3.0, 12.0


def membership(least, most):
    return Membership(min_nodes=least, max_nodes=most, last_call_s=LAST_CALL_S, lost_after_s=LOST_AFTER_S)


def offer(number):
    return NodeOffer(number=number, address=f"10.0.0.{number}", port=20_000 + number)


def asked(found, numbers, now):
    """Let nodes ask to join; return what each is told."""
    return {number: found.join(str(number), offer(number), now) for number in numbers}


def started(least, most, numbers):
    """Return a membership whose first round these nodes have begun."""
    found = membership(least, most)
    asked(found, numbers, 0.0)
    told = asked(found, numbers, LAST_CALL_S)
    assert {entry for entry, _ in told.values()} == {Entry.MEMBER}
    return found


@given(st.permutations(range(4)), st.integers(1, 4))
def test_members_are_in_the_order_of_their_numbers_and_meet_at_the_first(order, least):
    found = membership(least, 4)
    asked(found, order, 0.0)
    told = asked(found, order, 0.0)
    for number, (entry, place) in told.items():
        assert (entry, place.index, place.num_nodes) == (Entry.MEMBER, number, 4)
        assert (place.address, place.port, place.round) == ("10.0.0.0", 20_000, 0)


def test_enough_nodes_wait_for_more_until_the_last_call_is_over():
    found = membership(2, 3)
    assert asked(found, [0, 1], 0.0)[1] == (Entry.WAIT, None)
    assert asked(found, [0, 1], LAST_CALL_S - 0.1)[1] == (Entry.WAIT, None)
    assert asked(found, [0, 1], LAST_CALL_S)[1][0] is Entry.MEMBER


def test_too_few_wait_however_long():
    found = membership(2, 3)
    for now in range(0, 100, 2):
        assert asked(found, [0], float(now))[0] == (Entry.WAIT, None)


def test_a_node_that_comes_waits_until_all_members_have_left_and_then_belongs_to_the_next_round():
    found = started(1, 2, [1])
    assert found.join("0", offer(0), 4.0) == (Entry.WAIT, None)
    assert found.heartbeat("1", 4.0) == View(num_waiting=1, num_present=1)
    found.leave("1", 5.0)
    told = asked(found, [0, 1], 5.0) | asked(found, [0], 5.0)
    assert [(told[n][1].round, told[n][1].index) for n in (0, 1)] == [(1, 0), (1, 1)]


def test_a_node_too_many_is_spare_and_is_not_waited_for_until_a_member_is_gone():
    found = started(1, 2, [0, 1])
    assert found.join("2", offer(2), 4.0) == (Entry.SPARE, None)
    assert found.heartbeat("0", 4.0) == View(num_waiting=0, num_present=2)
    found.leave("1", 4.0)
    assert found.heartbeat("0", 4.0) == View(num_waiting=1, num_present=1)


def test_nodes_that_wait_are_counted_as_far_as_a_round_would_let_them_in():
    found = started(1, 4, [0, 1, 2])
    asked(found, [3, 4], 4.0)
    assert found.heartbeat("0", 4.0) == View(num_waiting=1, num_present=3)


def test_a_silent_node_is_lost_and_the_others_are_not():
    found = started(1, 2, [0, 1])
    for now in itertools.takewhile(lambda now: now <= LAST_CALL_S + LOST_AFTER_S, itertools.count(4.0, 2.0)):
        assert found.heartbeat("0", now).num_present == 2
    assert found.heartbeat("0", now + 1.5).num_present == 1


def test_nodes_are_not_lost_by_a_pause_of_the_process_that_counts():
    found = started(1, 2, [0, 1])
    assert found.heartbeat("0", 1000.0).num_present == 2
    assert found.heartbeat("1", 1001.0).num_present == 2


def test_a_round_that_a_member_left_before_another_read_of_it_is_not_begun():
    found = membership(2, 2)
    asked(found, [0, 1], 0.0)
    found.leave("0", 0.0)
    assert found.join("1", offer(1), 0.0) == (Entry.BROKEN, None)
    told = asked(found, [0, 1], 0.0) | asked(found, [0], 0.0)
    assert [told[n][1].round for n in (0, 1)] == [1, 1]


def test_nodes_whose_round_is_over_wait_until_one_that_was_killed_is_lost():
    found = started(1, 3, [0, 1, 2])
    for number in (0, 1):
        found.leave(str(number), 4.0)
    for now in itertools.takewhile(lambda now: now <= LAST_CALL_S + LOST_AFTER_S, itertools.count(4.0, 0.5)):
        assert asked(found, [0, 1], now) == {0: (Entry.WAIT, None), 1: (Entry.WAIT, None)}
    asked(found, [0, 1], now + 0.5)
    told = asked(found, [0, 1], now + 0.5 + LAST_CALL_S)
    assert [(told[n][1].round, told[n][1].num_nodes) for n in (0, 1)] == [(1, 2), (1, 2)]


def test_a_node_made_again_replaces_the_lost_one_of_its_number_at_once():
    found = started(2, 2, [0, 1])
    assert found.join("new", offer(1), 4.0) == (Entry.WAIT, None)
    assert found.heartbeat("0", 4.0) == View(num_waiting=1, num_present=1)
    found.leave("0", 4.0)
    asked(found, [0], 4.0)
    assert found.join("new", offer(1), 4.0)[1].index == 1
    assert found.join("0", offer(0), 4.0)[1].num_nodes == 2


def test_the_first_exit_code_ends_the_run_for_all():
    found = started(1, 2, [0])
    found.close(76)
    found.close(0)
    assert found.join("1", offer(1), 4.0) == (Entry.CLOSED, None)
    assert found.exit_code == 76


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "join", "join", "heartbeat", "leave"]),
        st.integers(0, 4),
        st.floats(0.0, 3.0),
    ),
    max_size=60,
)


@examples(200)
@given(STEPS, st.integers(1, 3), st.integers(0, 2))
def test_whatever_nodes_do_the_members_of_a_round_agree(steps, least, more):
    found, now = membership(least, least + more), 0.0
    rounds, broken = {}, set()
    for what, number, pause_s in steps:
        now += pause_s
        if what == "join":
            before = found.round
            entry, place = found.join(str(number), offer(number), now)
            if entry is Entry.BROKEN:
                assert (number, before) not in broken, "it is told once: a node that asks at once would spin"
                broken.add((number, before))
            if entry is Entry.MEMBER:
                rounds.setdefault(place.round, {})[number] = place
        elif what == "leave":
            found.leave(str(number), now)
        else:
            view = found.heartbeat(str(number), now)
            assert view.num_present <= least + more
    for places in rounds.values():
        assert len({(p.num_nodes, p.address, p.port) for p in places.values()}) == 1
        (size, *_) = {p.num_nodes for p in places.values()}
        assert least <= size <= least + more
        assert all(p.index < size for p in places.values())
        in_order = [places[number].index for number in sorted(places)]
        assert in_order == sorted(set(in_order))
