"""The engine's steps over a stand-in for a network: who gets which piece, and what a failure ends."""

import math
from dataclasses import replace

import pytest

from penstock.core.errors import RunnerLost, UsageError
from penstock.engine.outputs import SampledTokens
from penstock.engine.request import Request
from penstock.engine.sampling_params import Sampling
from tests.hashing_engine import hashing_engine, run_to_end, tokens_of
from tests.hashing_model import answer_of


def request(*prompt, max_tokens=6, **more):
    return Request(prompt=prompt, max_tokens=max_tokens, **more)


def finishes(pieces):
    return {(p.request_id, p.answer): p.finish for p in pieces if p.finish is not None}


def test_every_request_gets_its_own_tokens_and_one_last_piece():
    engine = hashing_engine()
    requests = [request(*range(n, 2 * n + 1), max_tokens=1 + n % 7) for n in range(20)]
    ids = [engine.add(r) for r in requests]
    pieces = run_to_end(engine)
    for request_id, asked in zip(ids, requests, strict=True):
        assert tokens_of(pieces, request_id) == answer_of(asked)
        ends = [p.finish for p in pieces if p.request_id == request_id and p.finish]
        assert ends == ["length"]


def test_answers_to_one_prompt_are_told_apart_and_share_its_blocks():
    engine = hashing_engine()
    asked = request(*range(12), num_answers=3)
    request_id = engine.add(asked)
    pieces = run_to_end(engine)
    assert [tokens_of(pieces, request_id, n) for n in range(3)] == [answer_of(asked)] * 3
    assert {p.answer: p.num_cached for p in pieces if p.finish} == {0: 0, 1: 8, 2: 8}


def test_an_end_token_is_no_part_of_the_answer_unless_it_came_too_early():
    asked = request(1, 2, 3, max_tokens=8)
    tokens = answer_of(asked)
    engine = hashing_engine()
    ended = engine.add(request(1, 2, 3, max_tokens=8, stop_ids=frozenset({tokens[2]})))
    later = engine.add(
        request(
            1, 2, 3, max_tokens=8, stop_ids=frozenset({tokens[2], tokens[5]}), sampling=Sampling(min_tokens=4)
        )
    )
    pieces = run_to_end(engine)
    assert (tokens_of(pieces, ended), tokens_of(pieces, later)) == (tokens[:2], tokens[:5])
    assert set(finishes(pieces).values()) == {"stop"}


def test_a_cancelled_request_ends_at_once_and_says_so():
    engine = hashing_engine()
    first, second = engine.add(request(1, 2, num_answers=2)), engine.add(request(3))
    engine.step()
    engine.cancel(first)
    engine.cancel(first)  # once more does nothing
    engine.cancel(12345)  # nor does a request that never was
    assert engine.scheduler.pool.num_used == len(engine.scheduler.running[0].tables[0].blocks)
    ends = finishes(run_to_end(engine))
    assert ends == {(first, 0): "cancelled", (first, 1): "cancelled", (second, 0): "length"}


def test_a_request_whose_time_is_over_ends_with_what_it_has():
    engine = hashing_engine()
    late = engine.add(request(1, 2, 3, deadline_s=-math.inf))
    assert finishes(run_to_end(engine)) == {(late, 0): "deadline"}


def test_a_request_that_could_never_be_answered_is_refused():
    engine = hashing_engine(num_blocks=4)
    with pytest.raises(UsageError, match="need 17 positions of the cache, which has 16"):
        engine.add(request(*range(10), max_tokens=7))
    assert not engine.has_work


def test_an_adapter_that_is_not_there_is_refused():
    engine = hashing_engine()
    with pytest.raises(UsageError, match=r"nknown adapter \(got 'zz'\). Known: a"):
        engine.add(request(1, adapter="zz"))
    asked = request(1, 2, adapter="b")
    request_id = engine.add(asked)
    assert tokens_of(run_to_end(engine), request_id) == answer_of(asked)


def test_the_scheduler_is_told_what_a_step_took_unless_it_failed(monkeypatch):
    failing = iter([False, True])

    def before(_):
        now.append(now[-1] + 0.25)
        if next(failing):
            raise MemoryError("of a step")

    now, told = [100.0], []
    monkeypatch.setattr("penstock.core.clock.monotonic", lambda: now[-1])
    engine = hashing_engine(before=before)
    commit = engine.scheduler.commit
    monkeypatch.setattr(
        engine.scheduler, "commit", lambda *a, seconds: (told.append(seconds), commit(*a, seconds=seconds))
    )
    engine.add(request(1, 2))
    engine.step()
    engine.step()
    assert told == [0.25, None]


def test_a_step_that_fails_ends_the_answers_in_it_and_no_others():
    failing = iter([False, False, True])

    def before(_):
        if next(failing, False):
            raise MemoryError("of a step")

    engine = hashing_engine(before=before)
    first = engine.add(request(1, 2, num_answers=2))
    engine.step()
    engine.step()
    pieces = engine.step()
    assert finishes(pieces) == {(first, 0): "error", (first, 1): "error"}
    assert "MemoryError('of a step')" in pieces[0].error
    assert engine.stats().used_blocks == 0
    asked = request(7, 8)
    second = engine.add(asked)
    assert tokens_of(run_to_end(engine), second) == answer_of(asked)
    assert engine.stats().counts.failed_steps == 1


def test_an_answer_whose_numbers_are_none_ends_alone():
    def instead(share):
        return SampledTokens(error="not finite") if share.sequence.request_id == 1 else None

    engine = hashing_engine(instead=instead)
    requests = [request(n, n + 1) for n in range(3)]
    for asked in requests:
        engine.add(asked)
    pieces = run_to_end(engine)
    assert finishes(pieces) == {(0, 0): "length", (1, 0): "error", (2, 0): "length"}
    assert tokens_of(pieces, 2) == answer_of(requests[2])


def test_a_lost_runner_ends_the_engine_and_closing_it_ends_every_answer():
    def before(_):
        raise RunnerLost("Rank 1 is gone")

    engine = hashing_engine(before=before)
    ids = [engine.add(request(n)) for n in range(12)]  # more than run at once
    with pytest.raises(RunnerLost):
        engine.step()
    assert finishes(engine.close("error")) == {(request_id, 0): "error" for request_id in ids}
    assert engine.close("error") == []
    assert (engine.runner.closed, engine.stats().used_blocks) == (True, 0)


def events_of(engine):
    """Note launches, with the number of tokens, and readings of an engine from now on."""
    noted, run = [], engine.runner.run

    def noting_run(batch, settings=None, *, samples=False):
        noted.append(("launch", len(batch.token_ids)))
        output = run(batch, settings, samples=samples)
        drawn = output.drawn
        return replace(output, drawn=drawn and (lambda: (noted.append(("read",)), drawn())[1]))

    engine.runner.run = noting_run
    return noted


def test_the_next_step_is_launched_before_the_last_one_is_read():
    engine = hashing_engine(overlaps=True)
    noted = events_of(engine)
    asked = request(1, 2, max_tokens=3)
    request_id = engine.add(asked)
    assert engine.step() == []
    assert [piece.token_ids for piece in engine.step()] == [(answer_of(asked)[0],)]
    assert tokens_of(run_to_end(engine), request_id) == answer_of(asked)[1:]
    assert noted == [("launch", 2), ("launch", 1), ("read",), ("launch", 1), ("read",), ("read",)]


def test_a_step_to_which_the_host_adds_is_read_at_once():
    engine = hashing_engine(overlaps=True)
    noted = events_of(engine)
    engine.add(request(1, 2, max_tokens=3))
    engine.step()
    engine.add(request(7, sampling=Sampling(num_logprobs=0), max_tokens=1))
    assert len(engine.step()) == 3  # two of the first request, and the other's
    assert noted == [("launch", 2), ("launch", 2), ("read",)]  # those of the second are not the device's
    run_to_end(engine)


def test_the_position_after_an_end_token_is_computed_and_leaves_no_trace():
    asked = request(*range(4), max_tokens=8)
    tokens = answer_of(asked)
    engine = hashing_engine(overlaps=True)
    noted = events_of(engine)
    request_id = engine.add(request(*range(4), max_tokens=8, stop_ids=frozenset({tokens[3]})))
    pieces = run_to_end(engine)
    assert tokens_of(pieces, request_id) == tokens[:3]
    assert len([event for event in noted if event[0] == "launch"]) == 5  # four, and one too many
    assert not engine.has_work
    assert engine.stats().counts.sampled == 4
    assert len(engine.scheduler.pool._by_name) == 1  # the prompt; the second block ends with the surplus


def test_cancelling_returns_what_was_computed_before():
    engine = hashing_engine(overlaps=True)
    asked = request(1, 2)
    first, second = engine.add(asked), engine.add(request(3))
    engine.step()
    engine.cancel(first)
    pieces = engine.step()
    assert [(p.token_ids, p.finish) for p in pieces if p.request_id == first] == [
        ((answer_of(asked)[0],), None),
        ((), "cancelled"),
    ]
    assert finishes(run_to_end(engine)) == {(second, 0): "length"}


def test_a_launch_that_fails_leaves_the_tokens_of_the_step_before():
    failing = iter([False, True])

    def before(_):
        if next(failing, False):
            raise MemoryError("of a step")

    engine = hashing_engine(overlaps=True, before=before)
    asked = request(1, 2)
    request_id = engine.add(asked)
    engine.step()
    pieces = engine.step()
    assert tokens_of(pieces, request_id) == answer_of(asked)[:1]
    assert finishes(pieces) == {(request_id, 0): "error"}
    assert engine.stats().counts.failed_steps == 1
    assert run_to_end(engine) == []


def test_a_step_that_cannot_be_read_ends_its_answers_and_the_next_one_is_dropped():
    engine = hashing_engine(overlaps=True)
    draw = engine._token_sampler.draw
    failing = iter([False, True])

    def broken(plan, output, draws):
        if next(failing, False):
            raise RuntimeError("device")
        return draw(plan, output, draws)

    engine._token_sampler.draw = broken
    request_id = engine.add(request(*range(8)))
    pieces = run_to_end(engine)
    assert (len(tokens_of(pieces, request_id)), finishes(pieces)) == (1, {(request_id, 0): "error"})
    assert not engine.scheduler.pool._by_name  # what it computed is in doubt
    asked = request(*range(8))
    again = engine.add(asked)
    assert tokens_of(run_to_end(engine), again) == answer_of(asked)
