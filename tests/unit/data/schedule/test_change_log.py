"""What a run was told: sums over batch sizes, ids around skips, changes before and after planned ones."""

import pytest

from penstock.core.errors import UsageError
from penstock.data.schedule.change_log import ChangeLog, Skip
from penstock.data.types import MAX_SAMPLES

A, B, C = {"web": 1, "code": 1}, {"web": 3, "code": 1}, {"web": 1, "code": 9}
PLAIN = ChangeLog(((0, 4),), ((0, 16),), ((0, A, "recipe"),))
SIZED = ChangeLog(((0, 4), (5, 5), (6, 10)), ((0, 16), (6, 32)), ((0, A, "recipe"),))


@pytest.mark.parametrize(
    ("step", "samples", "tokens"),
    [
        (0, 0, 0),
        (4, 16, 256),
        (5, 20, 320),
        (6, 25, 400),
        (7, 35, 720),
        (10**13, 25 + (10**13 - 6) * 10, None),
    ],
)
def test_samples_and_tokens_before_a_step_are_sums_over_what_held(
    step: int, samples: int, tokens: int | None
) -> None:
    assert SIZED.consumed_before(step) == samples
    assert tokens is None or SIZED.tokens_before(step) == tokens


def test_ids_step_over_what_is_skipped_and_back() -> None:
    change_log = SIZED.with_skip(Skip(2, 5, "a")).with_skip(Skip(9, 10, "b"))
    assert change_log.samples_of(0).tolist() == [0, 1, 5, 6]
    assert change_log.samples_of(1).tolist() == [7, 8, 10, 11]
    assert [change_log.first_sample(step) for step in range(8)] == [
        int(change_log.samples_of(step)[0]) for step in range(8)
    ]
    found = {sample: step for step in range(8) for sample in change_log.samples_of(step).tolist()}
    assert {sample: change_log.step_of(sample) for sample in found} == found
    assert [change_log.step_of(sample) for sample in (2, 4, 9)] == [None] * 3


@pytest.mark.parametrize("step", [-1, 2**62, 2**62 - 1, 2**80])
def test_a_step_beyond_what_can_be_counted_is_refused(step: int) -> None:
    with pytest.raises(UsageError, match="A step must be zero or more"):
        PLAIN.samples_of(step)


def test_the_last_step_that_can_be_counted_is_served() -> None:
    assert PLAIN.samples_of(MAX_SAMPLES // 4 - 1).tolist()[-1] == MAX_SAMPLES - 1


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([(10, 20, "a"), (30, 40, "b")], [(10, 20, "a"), (30, 40, "b")]),
        ([(30, 40, "b"), (10, 20, "a")], [(10, 20, "a"), (30, 40, "b")]),
        ([(10, 20, "a"), (20, 40, "b")], [(10, 40, "a; b")]),
        ([(10, 20, "a"), (15, 18, "b")], [(10, 20, "a; b")]),
        ([(10, 20, "a"), (30, 40, "b"), (19, 31, "")], [(10, 40, "a; b")]),
        ([(10, 20, "a"), (5, 30, "b"), (10, 20, "a"), (10, 20, "b")], [(5, 30, "a; b")]),
    ],
)
def test_skips_that_touch_become_one_and_keep_their_reasons_once(
    told: list[tuple[int, int, str]], expected: list[tuple[int, int, str]]
) -> None:
    change_log = PLAIN
    for skip in told:
        change_log = change_log.with_skip(Skip(*skip))
    assert [(s.start, s.stop, s.reason) for s in change_log.skips] == expected


def test_a_change_holds_until_the_next_planned_one_even_where_that_repeats_it() -> None:
    planned = PLAIN.with_slots(10, B, "planned").with_length(10, 32)
    early = planned.with_slots(3, B, "told").with_length(3, 32)
    assert early.change_steps() == [0, 3], "the planned one changes nothing then"
    other = early.with_slots(5, C, "told").with_length(5, 64)
    assert [other.slots_at(step) for step in (0, 3, 5, 9, 10)] == [A, B, C, C, B]
    assert [other.length_at(step) for step in (0, 3, 5, 9, 10)] == [16, 32, 64, 64, 32]
    assert other.change_steps() == [0, 3, 5, 10]


def test_corpora_of_no_weight_do_not_make_another_mixture() -> None:
    assert PLAIN.with_slots(4, {**A, "gone": 0}, "remove").change_steps() == [0]


def test_what_is_settled_says_the_same_in_fewer_words() -> None:
    told = (
        SIZED.with_batch_size(7, 10).with_slots(2, A, "again").with_batch_size(20, 10).with_slots(20, A, "x")
    )
    assert told.settled(10).batch == (*SIZED.batch, (20, 10))
    assert told.settled(10).mix == (*SIZED.mix, (20, A, "x"))
    assert told.until(11) == SIZED


def test_growth_is_told_in_the_order_of_steps() -> None:
    grown = PLAIN.with_parts(9, "web", 3).with_parts(4, "web", 2)
    assert grown.grown == ((4, "web", 2), (9, "web", 3))
    assert grown.until(9).grown == ((4, "web", 2),)
