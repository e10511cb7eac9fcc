"""The number of drafts: many where they stand and a step has room, none where they only cost."""

from functools import cache
from itertools import accumulate, islice
from operator import and_

import numpy as np
import pytest

from penstock.engine.request import Request
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.speculation.draft_length import DraftLength


def sequence(number=0, *, drawn=1, max_tokens=1000):
    request = Request(prompt=(1, 2), max_tokens=max_tokens)
    return Sequence(id=number, request_id=number, answer=0, request=request, tokens=[1, 2, *range(drawn)])


def lived(
    length, *, chance, batch=1, fixed_s=0.01, per_token_s=0.0002, draft_s=0.0, jump_s=0.0, steps=200, busy=0.0
):
    """Run a made-up machine by what the pace says; return tokens kept per second of its second half.

    Its first step takes 20 times as long, and others, with the chance of `busy`, five times.
    """
    rng, disturbed = np.random.default_rng(0), np.random.default_rng(1)
    sequences = [sequence(number) for number in range(batch)]
    seconds = kept = 0.0
    wanted = length.wanted(sequences)
    for step in range(steps):
        draws = iter((rng.random(sum(wanted)) < chance).tolist())
        stood = [sum(accumulate(islice(draws, num), and_)) for num in wanted]  # those before the first miss
        positions, tokens = batch + sum(wanted), batch + sum(stood)
        took, drafting = fixed_s + per_token_s * positions + jump_s * any(wanted), draft_s * sum(wanted)
        slow = 20.0 if step == 0 else 5.0 if disturbed.random() < busy else 1.0
        length.record_step(
            slow * took,
            num_tokens=positions,
            num_kept=tokens,
            drafting_s=slow * drafting,
            num_drafts=sum(wanted),
        )
        for one, num, good in zip(sequences, wanted, stood, strict=True):
            one.tokens.extend([0] * (good + 1))
            if num:
                length.record(one, num_drafts=num, num_kept=good)
        wanted = length.wanted(sequences)
        if step >= steps // 2:
            seconds, kept = seconds + took + drafting, kept + tokens
    return kept / seconds


@cache
def fixed(most, **machine):
    """Return the rate of a number of drafts that is always the same: a busy machine changes nothing of it."""
    return lived(DraftLength(most=most, adapt=False), **machine)


@pytest.mark.parametrize("busy", [0.0, 0.2])
@pytest.mark.parametrize("draft_s", [0.0, 0.0003])
@pytest.mark.parametrize("chance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("batch", [1, 8, 48])
def test_the_pace_is_close_to_the_best_number_for_all_steps(batch, chance, draft_s, busy):
    machine = {"chance": chance, "batch": batch, "draft_s": draft_s}
    rates = [fixed(most, **machine) for most in range(5)]
    adapted = lived(DraftLength(most=4), busy=busy, **machine)
    least = 0.75 if busy else 0.92  # what knowing the costs costs
    assert adapted > least * max(rates)
    assert adapted > 0.92 * rates[0]  # never much slower than without drafts


@pytest.mark.parametrize("busy", [0.0, 0.2])
@pytest.mark.parametrize("jump_s", [0.0, 0.003, 0.01])  # what a step with drafts takes longer, however many
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_drafts_cost_a_twentieth_at_most_in_the_long_run(batch, chance, jump_s, busy):
    machine = {
        "chance": chance,
        "batch": batch,
        "jump_s": jump_s,
        "draft_s": 3e-5,
        "busy": busy,
        "steps": 600,
    }
    assert lived(DraftLength(most=4), **machine) > 0.95 * fixed(0, chance=0.0, batch=batch)


def told(length, *, num_kept, steps=100, **machine):
    """Return how many drafts a sequence makes after a life in which so many of four stood."""
    lived(length, chance=num_kept / 4, steps=steps, **machine)
    return max(length.wanted([sequence()])[0] for _ in range(3))


def test_drafts_that_stand_are_made():
    assert told(DraftLength(most=4), num_kept=4) == 4


def test_drafts_that_fall_are_not():
    assert told(DraftLength(most=4), num_kept=0, batch=8) == 0


def test_a_large_batch_makes_none_where_a_small_one_does():
    few, many = (told(DraftLength(most=4), num_kept=2, batch=batch) for batch in (1, 256))
    assert few > many == 0


def test_a_slow_drafter_guesses_less():
    assert told(DraftLength(most=4), num_kept=3, draft_s=0.005) < told(DraftLength(most=4), num_kept=3)


def test_sequences_are_judged_one_by_one():
    length = DraftLength(most=4)
    lived(length, chance=0.5, per_token_s=0.001, steps=170)
    for _ in range(40):
        length.record(sequence(1), num_drafts=4, num_kept=4)
        length.record(sequence(2), num_drafts=4, num_kept=0)
    assert length.wanted([sequence(1), sequence(2)]) == [4, 0]


def test_now_and_then_a_step_does_the_opposite():
    for chance in (0.0, 1.0):
        length = DraftLength(most=4)
        lived(length, chance=chance, batch=8)
        wanted = [length.wanted([sequence()])[0] for _ in range(80)]
        assert sorted(wanted) == sorted([0] * 76 + [1] * 4 if chance == 0 else [4] * 76 + [0] * 4)


@pytest.mark.parametrize(("drawn", "expected"), [(0, 4), (7, 2), (8, 1), (9, 0)])
def test_no_draft_is_made_that_the_answer_has_no_room_for(drawn, expected):
    length = DraftLength(most=4, adapt=False)
    assert length.wanted([sequence(drawn=drawn, max_tokens=10)]) == [expected]


def test_a_sequence_that_ended_is_forgotten():
    length = DraftLength(most=4)
    length.record(sequence(5), num_drafts=4, num_kept=0)
    fresh = DraftLength(most=4)
    length.forget(sequence(5))
    assert length._each == fresh._each
