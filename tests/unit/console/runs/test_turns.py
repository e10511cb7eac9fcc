"""Turns: who waits comes next, and nobody waits for ever."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from penstock.console.runs.turns import RunBusy, Turns


def test_who_waits_comes_before_the_one_who_had_the_last_turn():
    turns, order, began = Turns(wait_s=60), [], Event()

    def parse():
        for piece in range(200):
            with turns.turn():
                order.append(piece)
                began.set()
                if piece == 0:
                    assert waits.wait(60)

    def look():
        began.wait(60)
        waits.set()
        with turns.turn():
            order.append("look")

    waits = Event()
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(parse), pool.submit(look)]:
            done.result()
    assert order.index("look") < 150, "not after the whole parse"


def test_a_turn_that_does_not_come_is_a_sentence_and_takes_no_turn():
    turns = Turns(wait_s=0.01)
    with turns.turn(), pytest.raises(RunBusy, match="Another request"), turns.turn():
        pass
    with turns.turn():
        pass
