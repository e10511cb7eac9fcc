"""Fragments meet when they should, each once every so many steps, and their bytes are counted."""

import pytest

from penstock.parallel.ethernet.wire_size import encoded_bytes
from penstock.train.islands.schedule import Due, bytes_per_step, due, fragment_of, in_flight
from penstock.train.recipe.outer_config import OuterConfig

PLAIN = OuterConfig(every=3)
STREAMING = OuterConfig(every=8, fragments=2, overlap=3)


def steps_of(config, what, fragment, *, steps=25):
    return [step for step in range(1, steps) if fragment in getattr(due(config, step), what)]


def test_without_fragments_and_overlap_all_happens_after_every_nth_step():
    for what in ("begin", "turn", "arrive"):
        assert steps_of(PLAIN, what, 0, steps=10) == [3, 6, 9]


def test_fragments_take_turns_and_arrive_the_overlap_later():
    assert steps_of(STREAMING, "begin", 0) == [4, 12, 20]
    assert steps_of(STREAMING, "turn", 0) == [6, 14, 22]
    assert steps_of(STREAMING, "arrive", 0) == [7, 15, 23]
    assert steps_of(STREAMING, "begin", 1) == [8, 16, 24]
    assert steps_of(STREAMING, "arrive", 1) == [11, 19]
    assert [step for step in range(20) if in_flight(STREAMING, step) == (0,)] == [4, 5, 6, 12, 13, 14]


@pytest.mark.parametrize("every", [3, 4, 7])
def test_no_two_fragments_meet_at_one_step_where_they_need_not(every):
    config = OuterConfig(every=every, fragments=3)
    for step in range(every, 4 * every):
        assert len(due(config, step).begin) <= 1
    for fragment in range(3):
        assert len(steps_of(config, "begin", fragment, steps=1 + 5 * every)) == 5


def test_after_the_last_step_everything_meets():
    assert due(STREAMING, 5, last=True) == Due(begin=(0, 1), turn=(0, 1), arrive=(0, 1))


def test_blocks_are_dealt_in_turn_and_the_ends_go_with_the_first_and_the_last():
    names = ["embed_tokens.weight", *(f"layers.{i}.norm.weight" for i in range(5)), "lm_head.weight"]
    assert [fragment_of(name, 3) for name in names] == [0, 0, 1, 2, 0, 1, 2]


def test_bytes_of_an_exchange_there_and_back():
    """Three islands: two thirds of the numbers leave each of them, twice."""
    for bits, codec in ((32, "float32"), (8, "int8"), (4, "int4")):
        config = OuterConfig(every=10, bits=bits)
        expected = 2 * 2 / 3 * encoded_bytes(12_800, codec) / 10
        assert bytes_per_step(config, parameters=12_800, islands=3) == pytest.approx(expected)
    assert bytes_per_step(OuterConfig(every=10), parameters=12_800, islands=1) == 0
