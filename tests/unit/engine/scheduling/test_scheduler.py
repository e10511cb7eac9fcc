"""What a step holds: decodes before prompts, nobody starved, blocks given up by who matters least."""

import pytest
from tests.hashing_model import HashingModel, answer_of, finish_full, run_plan, run_to_end, sequences_of

from penstock.core.errors import UsageError
from penstock.engine.request import Request
from penstock.engine.scheduling.blocks import BlockPool
from penstock.engine.scheduling.queue import ClientRoundRobin, WaitingQueue
from penstock.engine.scheduling.scheduler import Scheduler, StepLimits


class Engine:
    """A scheduler with the stand-in for a network."""

    def __init__(self, *, num_blocks=64, keep_idle=True, windows=(None,), **limits):
        usual = {"max_sequences": 8, "tokens_per_step": 16, "block_size": 4}
        limits = StepLimits(**{**usual, **limits}, windows=windows)
        self.scheduler = Scheduler(limits, BlockPool(num_blocks, keep_idle=keep_idle))
        self.model = HashingModel(num_blocks=num_blocks, block_size=limits.block_size, windows=windows)
        self.count = 0

    def add(self, length, max_tokens=4, *, token=1, **request):
        prompt = tuple((token * 31 + i) % 97 for i in range(length))
        whole = Request(prompt=prompt, max_tokens=max_tokens, **request)
        sequences = sequences_of(whole, first_id=self.count)
        self.count += len(sequences)
        for sequence in sequences:
            self.scheduler.add(sequence)
        return sequences[0] if len(sequences) == 1 else sequences

    def step(self):
        """Return sequence -> tokens of one step."""
        plan = self.scheduler.schedule(0.0)
        self.scheduler.commit(plan, run_plan(self.model, plan, self.scheduler.limits.block_size))
        finish_full(self.scheduler, plan)
        self.scheduler.check()
        return {share.sequence: share.num_tokens for share in plan.shares}

    def run(self):
        return run_to_end(self.scheduler, self.model)


def test_a_prompt_longer_than_a_step_is_computed_in_pieces():
    engine = Engine()
    sequence = engine.add(40, 3)
    assert [engine.step().get(sequence) for _ in range(5)] == [16, 16, 8, 1, 1]
    assert sequence.tokens[40:] == answer_of(sequence.request)


def test_a_long_prompt_does_not_halt_an_answer_in_the_making():
    engine = Engine()
    answering = engine.add(4, 10)
    engine.step()
    long = engine.add(60, token=2)
    for _ in range(4):
        assert engine.step() == {answering: 1, long: 15}


def test_a_short_prompt_passes_a_long_one_and_the_long_one_goes_on():
    engine = Engine()
    long = engine.add(100, client="x")
    short = engine.add(6, client="y", token=2)
    assert engine.step() == {long: 10, short: 6}
    assert short.num_sampled == 1


def test_what_others_cannot_use_is_given_to_the_long_prompt():
    engine = Engine(max_sequences=1)
    long = engine.add(100)
    engine.add(6, token=2)
    assert engine.step() == {long: 16}


def test_every_running_sequence_has_a_token_in_a_step():
    engine = Engine(max_sequences=8, tokens_per_step=3)
    sequences = [engine.add(2, 6, token=i) for i in range(5)]
    while engine.scheduler.has_work:
        decoding = [s for s in engine.scheduler.running if s.num_sampled]
        shares = engine.step()
        assert len(engine.scheduler.running) <= 3
        assert set(decoding) <= set(shares)
    assert all(sequence.num_sampled == 6 for sequence in sequences)


def test_the_latest_gives_up_its_blocks_and_ends_with_the_same_tokens():
    engine = Engine(num_blocks=10, tokens_per_step=64)
    first, second = engine.add(8, 24), engine.add(8, 24, token=2)
    engine.run()
    assert engine.scheduler.counts.num_preempted > 0
    for sequence in (first, second):
        assert sequence.tokens[8:] == answer_of(sequence.request)
    assert first.num_cached == second.num_cached == 0


def test_the_oldest_is_never_pre_empted():
    engine = Engine(num_blocks=10, tokens_per_step=64)
    oldest = engine.add(8, 30)
    for token in range(2, 6):
        engine.add(8, 20, token=token)
    engine.step()
    while oldest.finish is None:
        assert oldest in engine.step()
    engine.run()


def test_a_better_priority_drives_out_a_worse_one():
    engine = Engine(num_blocks=8, max_sequences=2)
    worse = [engine.add(4, 8, token=token, priority=1) for token in (1, 2)]
    engine.step()
    better = engine.add(16, 8, token=3, priority=0)
    assert better in engine.step()
    assert not worse[1].tables
    assert engine.scheduler.counts.num_preempted > 0
    engine.run()
    assert all(s.tokens[4:] == answer_of(s.request) for s in worse)


def test_who_drives_out_a_twin_does_not_count_on_its_blocks():
    engine = Engine(max_sequences=1, keep_idle=False)  # what nobody uses is empty at once
    slow = engine.add(13, 4, priority=1)
    engine.step()
    urgent = engine.add(13, 4, priority=0)
    assert engine.step() == {urgent: 13}
    engine.run()
    assert urgent.tokens == slow.tokens


def test_clients_who_always_wait_are_served_alike():
    engine = Engine(max_sequences=4, num_blocks=256)
    largest = 0
    for token in range(60):
        for client, length, max_tokens in (("long", 30, 9), ("short", 3, 2), ("short", 5, 4)):
            engine.add(length, max_tokens, token=token + 7 * length, client=client)
            largest = max(largest, length + 2 * max_tokens)
    turns = engine.scheduler.waiting._classes[0]
    while {sequence.request.client for sequence in turns} == {"long", "short"}:
        engine.step()
        served = turns.served
        # the bound of the paper: what all that run may be served before it is the other's turn
        assert abs(served["long"] - served["short"]) <= 4 * largest
    assert served["short"] > 500


def test_a_step_does_not_look_at_all_that_wait(monkeypatch):
    engine = Engine()
    for token in range(40):
        engine.add(8, token=token, client=f"client {token % 7}", priority=token % 3)
    monkeypatch.setattr(WaitingQueue, "__iter__", None)
    monkeypatch.setattr(ClientRoundRobin, "__iter__", None)
    while engine.scheduler.has_work:
        plan = engine.scheduler.schedule(0.0)
        engine.scheduler.commit(plan, run_plan(engine.model, plan, 4))
        finish_full(engine.scheduler, plan)


def test_an_equal_priority_waits_for_a_seat():
    engine = Engine(max_sequences=1)
    engine.add(4, 5)
    second = engine.add(4, token=2)
    engine.step()
    assert second not in engine.step()
    assert engine.scheduler.counts.num_preempted == 0


def test_blocks_that_no_window_reaches_are_free_while_the_answer_goes_on():
    engine = Engine(num_blocks=16, windows=(6,))
    sequence = engine.add(20, 40)
    used = []
    while engine.scheduler.has_work:
        engine.step()
        used.append(engine.scheduler.pool.num_used)
    assert max(used[2:-1]) <= 3  # a window of 6 lies in 3 blocks of 4 at most
    assert sequence.tokens[20:] == answer_of(sequence.request)
    again = engine.add(20, 1)
    engine.step()
    assert again.num_cached == 16  # their room was not needed


def test_a_prefix_is_found_where_a_window_still_sees_it():
    engine = Engine(windows=(6, None), tokens_per_step=64)
    engine.add(60, 1)
    engine.run()
    assert engine.scheduler.counts.num_found == 0
    again = engine.add(20, 1)  # the window had passed its end, and nothing took that memory
    assert engine.step() == {again: 4}
    assert again.num_cached == 16


def test_a_block_that_a_window_left_behind_gets_no_name_from_later_drafts():
    engine = Engine(windows=(1,), keep_idle=False, block_size=2)
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    sequence = engine.add(5, 9)
    scheduler.commit(scheduler.schedule(0.0), [[7]])
    sequence.drafts = (8, 9)
    scheduler.commit(scheduler.schedule(0.0), [[8, 9, 10]])
    assert sequence.num_computed == 8
    assert not any(pool.name_of(block) for block in range(pool.num_blocks) if not pool.users(block))


def test_a_prompt_beside_others_takes_the_blocks_of_a_worse_one():
    engine = Engine(num_blocks=22, windows=(8, None), tokens_per_step=8)
    better, worse = engine.add(40, 1, token=3), engine.add(4, 30, token=2, priority=1)
    engine.run()
    for sequence in (better, worse):
        assert sequence.tokens[sequence.num_prompt :] == answer_of(sequence.request)


def test_a_request_that_never_fits_is_refused_whatever_its_windows_hold():
    engine = Engine(num_blocks=4 + 3, windows=(6, None), tokens_per_step=4)
    with pytest.raises(UsageError, match=r"need 17 positions of the cache, which has 16 .*Shorten"):
        engine.add(10, 7)
    engine.add(10, 6)
    engine.run()
    Engine(num_blocks=3, windows=(6,), tokens_per_step=4).add(10, 900)  # 9 positions are in 3 blocks


def test_a_request_that_never_fits_is_refused():
    engine = Engine(num_blocks=4)
    with pytest.raises(UsageError, match=r"need 17 positions of the cache, which has 16 .*Shorten"):
        engine.add(10, 7)
    assert not engine.scheduler.has_work
    engine.add(10, 6)
    engine.run()


def test_a_prompt_seen_before_is_found():
    engine = Engine()
    engine.add(20, 1)
    engine.run()
    again = engine.add(20, 1)
    assert engine.step() == {again: 4}
    assert again.num_cached == 16
    assert engine.scheduler.counts.num_found == 16


def test_answers_of_one_request_share_the_blocks_of_its_prompt():
    engine = Engine(tokens_per_step=64)
    answers = engine.add(16, 4, num_answers=3)
    assert engine.step() == {answers[0]: 16}
    # blocks are shared but the last, whose last token has to be computed for its logits
    assert engine.step() == {answers[0]: 1, answers[1]: 4, answers[2]: 4}
    first, *others = [sequence.tables[0].blocks[:3] for sequence in answers]
    assert others == [first, first]
    engine.run()


def test_answers_share_where_nothing_is_kept_for_later():
    engine = Engine(tokens_per_step=64, keep_idle=False)
    answers = engine.add(17, 4, num_answers=2)
    engine.step()
    assert engine.step() == {answers[0]: 1, answers[1]: 1}
    engine.run()
    engine.add(17, 1)
    engine.run()
    assert engine.scheduler.counts.num_found == 16


def test_when_the_first_answer_is_cancelled_the_next_computes_the_prompt():
    engine = Engine()
    first, second, third = engine.add(32, 2, num_answers=3)
    engine.step()
    engine.scheduler.cancel(first.id)
    engine.scheduler.check()
    engine.step()
    assert second.num_computed > 0
    engine.scheduler.cancel(third.id)  # while it waits for the second
    engine.run()
    assert second.tokens[32:] == answer_of(second.request)
    assert (first.finish, third.finish) == ("cancelled", "cancelled")


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_cancelling_frees_blocks_at_once(steps_before):
    engine = Engine()
    sequence = engine.add(40)
    for _ in range(steps_before):
        engine.step()
    engine.scheduler.cancel(sequence.id)
    engine.scheduler.cancel(sequence.id, "error")
    assert sequence.finish == "cancelled"
    assert engine.scheduler.pool.num_used == 0
    assert not engine.scheduler.has_work


def test_what_was_drawn_for_a_cancelled_sequence_is_dropped():
    engine = Engine()
    first, second = engine.add(4), engine.add(4, token=2)
    plan = engine.scheduler.schedule(0.0)
    drawn = run_plan(engine.model, plan, 4)
    engine.scheduler.cancel(first.id)
    engine.scheduler.commit(plan, drawn)
    engine.scheduler.check()
    assert (first.num_sampled, second.num_sampled) == (0, 1)
    assert engine.scheduler.pool.num_used == 1


def test_a_deadline_ends_what_waits_and_what_runs():
    engine = Engine(max_sequences=1)
    running, waiting = engine.add(4, deadline_s=10.0), engine.add(4, token=2, deadline_s=10.0)
    never = engine.add(4, token=3)
    engine.step()
    plan = engine.scheduler.schedule(10.0)
    assert set(plan.expired) == {running, waiting}
    assert {running.finish, waiting.finish} == {"deadline"}
    assert [share.sequence for share in plan.shares] == [never]


def test_an_embedding_ends_with_its_prompt():
    engine = Engine()
    sequence = engine.add(40, 1, task="embed")
    assert engine.run() == 3
    assert (sequence.finish, sequence.num_sampled) == ("stop", 0)


def drafting(engine, sequence, drafts):
    """Compute the prompt, then guess."""
    engine.step()
    sequence.drafts = drafts
    return engine.step()


def test_accepted_drafts_are_tokens_and_the_others_leave_no_trace():
    engine = Engine()
    sequence = engine.add(4, 12)
    right = answer_of(sequence.request)
    assert drafting(engine, sequence, (right[1], right[2], 0, 0)) == {sequence: 5}
    assert sequence.tokens[4:] == right[:4]
    assert (sequence.num_computed, sequence.drafts) == (7, ())
    engine.run()
    assert sequence.tokens[4:] == right


def test_no_draft_goes_beyond_the_end_of_the_answer():
    engine = Engine()
    sequence = engine.add(4, 3)
    right = answer_of(sequence.request)
    assert drafting(engine, sequence, (right[1], right[2], 0)) == {sequence: 2}


def test_drafts_leave_half_of_the_rest_to_prompts():
    engine = Engine(tokens_per_step=16)
    sequence = engine.add(4, 40)
    engine.step()
    sequence.drafts = tuple(range(15))
    prompt = engine.add(60, token=2)
    assert engine.step() == {sequence: 8, prompt: 8}


def test_drafts_drive_nobody_out():
    engine = Engine(num_blocks=4)
    first, second = engine.add(4, 9), engine.add(4, 4, token=2)
    engine.step()
    first.drafts = tuple(range(8))
    # both need a second block, and there are two: guesses get what is left of the first one's own
    assert engine.step() == {first: 4, second: 1}
    assert engine.scheduler.counts.num_preempted == 0


def test_a_step_is_scheduled_while_the_tokens_of_the_last_one_are_not_known():
    engine = Engine()
    one, two = engine.add(4, 2), engine.add(4, 9, token=2)
    first = engine.scheduler.schedule(0.0)
    engine.scheduler.advance(first)
    assert [sequence.tokens[-1] for sequence in (one, two)] == [~0, ~1]
    second = engine.scheduler.schedule(0.0)
    assert [(share.sequence, share.start, share.samples) for share in second.shares] == [
        (one, 4, True),
        (two, 4, True),
    ]
    engine.scheduler.fill(first, [[7], [8]])
    engine.scheduler.advance(second)
    assert one.finish == "length"  # by its count
    assert [share.sequence for share in engine.scheduler.schedule(0.0).shares] == [two]
    engine.scheduler.fill(second, [[5], [6]])
    assert (one.tokens[4:], two.tokens[4:]) == ([7, 5], [8, 6])


def test_blocks_of_an_answer_that_failed_are_not_found_again():
    engine = Engine()
    failing = engine.add(20, 3)
    engine.step()
    engine.step()
    engine.scheduler.finish(failing, "error")
    again = engine.add(20, 1)
    engine.run()
    assert again.num_cached == 0
