"""Priorities are strict; clients of one priority are served alike, whatever they send."""

import random

from penstock.engine.request import Request
from penstock.engine.scheduling import queue
from penstock.engine.scheduling.queue import WaitingQueue
from penstock.engine.scheduling.sequence import Sequence


class Line:
    """A waiting line with sequences named by their order of arrival."""

    def __init__(self):
        self.waiting = WaitingQueue()
        self.count = 0

    def put(self, client, priority=0):
        request = Request(prompt=(1,), max_tokens=1, client=client, priority=priority)
        sequence = Sequence(id=self.count, request_id=self.count, answer=0, request=request, tokens=[1])
        self.count += 1
        self.waiting.put(sequence)
        return sequence

    def serve(self, amount=1):
        sequence = self.waiting.peek()
        self.waiting.remove(sequence)
        self.waiting.charge(sequence, amount)
        return sequence


def test_one_client_is_served_in_the_order_of_arrival():
    line = Line()
    put = [line.put("x") for _ in range(5)]
    assert [line.serve() for _ in range(5)] == put


def test_who_was_pre_empted_comes_before_who_arrived_later():
    line = Line()
    first, second = line.put("x"), line.put("x")
    assert line.serve() is first
    line.waiting.put(first)
    assert line.serve() is first
    assert line.serve() is second


def test_a_better_priority_goes_first_whatever_its_client_was_served():
    line = Line()
    worse, better = line.put("new", priority=1), line.put("old", priority=0)
    line.waiting.charge(better, 10**6)
    assert line.serve() is better
    assert line.serve() is worse


def test_clients_that_always_wait_are_served_alike():
    chance = random.Random(0)
    line = Line()
    for client, requests in (("many", 900), ("few", 300), ("some", 500)):
        for _ in range(requests):
            line.put(client)
    served = {"many": 0, "few": 0, "some": 0}
    largest = 40
    for _ in range(600):
        amount = chance.randint(1, largest)
        served[line.serve(amount).request.client] += amount
        assert max(served.values()) - min(served.values()) <= 2 * largest


def test_a_pause_gives_no_credit():
    line = Line()
    for _ in range(20):
        line.put("steady")
    for _ in range(10):
        line.serve(100)
    for _ in range(10):
        line.put("late")
    # from here on they take turns: what "late" did not use before is gone
    clients = [line.serve(100).request.client for _ in range(10)]
    assert clients.count("late") == 5


def test_who_comes_when_nobody_waits_starts_level_with_who_was_just_served():
    line = Line()
    line.put("x")
    line.serve(1000)
    for client in ("y", "y", "x", "x"):
        line.put(client)
    assert {line.serve().request.client, line.serve().request.client} == {"x", "y"}


def test_sequences_can_leave_from_the_middle():
    line = Line()
    put = [line.put("x") for _ in range(4)] + [line.put("y")]
    line.waiting.remove(put[1])
    line.waiting.remove(put[4])
    assert len(line.waiting) == 3
    assert [line.serve() for _ in range(3)] == [put[0], put[2], put[3]]
    assert line.waiting.peek() is None
    again = line.put("y")
    assert line.serve() is again


def test_clients_with_nothing_to_do_are_forgotten(monkeypatch):
    monkeypatch.setattr(queue, "_MANY_COUNTERS", 8)
    line = Line()
    for number in range(1000):
        line.put(f"client {number}")
        line.serve()
    turns = line.waiting._classes[0]
    assert len(turns.served) < 24
    assert len(turns._heap) < 16
