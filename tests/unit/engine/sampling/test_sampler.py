"""The sampler of a step: mixed batches, repeatability, what excludes tokens, and answers that fail."""

import numpy as np
import pytest
import torch

from penstock.engine.request import Request
from penstock.engine.sampling.sampler import NOT_FINITE, NOTHING_LEFT, Row, Sampler, rows_of, uniforms
from penstock.engine.sampling_params import Sampling
from penstock.engine.scheduling.sequence import ScheduledTokens, Sequence, StepPlan

VOCAB = 50
LOGITS = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
ALL = {"temperature": 1.0, "top_p": 1.0}


def answer_of(drawn=(), *, prompt=(1, 2, 3), number=0, answer=0, stop_ids=(), grammar=None, **sampling):
    request = Request(
        prompt=prompt,
        max_tokens=100,
        sampling=Sampling(**sampling),
        stop_ids=frozenset(stop_ids),
        grammar=grammar,
    )
    return Sequence(id=number, request_id=0, answer=answer, request=request, tokens=[*prompt, *drawn])


def sampled(sampler, logits, rows):
    return sampler.draw(logits, sampler.prepare(rows))


def draw(logits, *answers):
    return sampled(Sampler(), logits[: len(answers)], [Row(a) for a in answers])


def test_temperature_zero_takes_the_likeliest():
    rows = [answer_of(number=i, temperature=0) for i in range(8)]
    assert draw(LOGITS, *rows).tokens == LOGITS.argmax(-1).tolist()


def test_a_token_does_not_depend_on_its_batch():
    kinds = [
        {"temperature": 0},
        {**ALL, "seed": 4},
        {"temperature": 0.9, "top_p": 0.7},
        {"temperature": 0, "repetition_penalty": 1.8},
        {**ALL, "frequency_penalty": 1.0, "num_logprobs": 2},
        {"temperature": 0, "logit_bias": {4: 5.0}},
        {**ALL, "min_tokens": 9},
        {**ALL, "top_k": 4},
    ]
    answers = [answer_of([5, 5, 6], number=i, stop_ids=[0], **kind) for i, kind in enumerate(kinds)]
    together = draw(LOGITS, *answers).tokens
    alone = [draw(LOGITS[i : i + 1], a).tokens[0] for i, a in enumerate(answers)]
    assert together == alone
    order = [3, 1, 7, 0, 5, 2, 6, 4]
    turned = sampled(Sampler(), LOGITS[order], [Row(answers[i]) for i in order]).tokens
    assert turned == [together[i] for i in order]


def test_a_draw_depends_on_seed_answer_and_position_only():
    logits = LOGITS[:1].expand(50, -1)

    def drawn(**kind):
        return draw(logits, *(answer_of([9] * i, number=i, **ALL, **kind) for i in range(50))).tokens

    assert drawn() == drawn()
    assert drawn() != drawn(seed=1)
    assert drawn() != drawn(answer=1)
    assert len(set(drawn())) > 10


def test_a_sampler_that_knew_an_answer_and_one_that_did_not_draw_alike():
    kind = {**ALL, "presence_penalty": 1.5, "repetition_penalty": 1.2}
    first, tokens = Sampler(), []
    for _ in range(12):  # the second has no memory of the steps before, as after a pre-emption elsewhere
        answer = answer_of(tokens, **kind)
        (token,) = sampled(first, LOGITS[:1], [Row(answer)]).tokens
        assert sampled(Sampler(), LOGITS[:1], [Row(answer)]).tokens == [token]
        tokens.append(token)
    assert len(set(tokens)) > 6


def test_rows_of_drafts_draw_what_they_would_if_the_drafts_stood():
    kind = {**ALL, "presence_penalty": 2.0, "frequency_penalty": 1.0}
    answer, drafts = answer_of([4], **kind), (7, 8, 7)
    share = ScheduledTokens(sequence=answer, start=3, num_tokens=4, reaches_end=True, drafts=drafts)
    rows = rows_of(StepPlan(shares=(share,)))
    assert [row.drafts for row in rows] == [(), (7,), (7, 8), (7, 8, 7)]
    sampler = Sampler()
    found = sampled(sampler, LOGITS[:4], rows).tokens
    expected = [draw(LOGITS[n : n + 1], answer_of([4, *drafts[:n]], **kind)).tokens[0] for n in range(4)]
    assert found == expected
    answer.tokens.append(9)  # all were refused
    expected = draw(LOGITS[4:5], answer_of([4, 9], **kind)).tokens
    assert sampled(sampler, LOGITS[4:5], [Row(answer)]).tokens == expected


def test_shares_that_do_not_reach_the_end_have_no_rows():
    long = ScheduledTokens(sequence=answer_of(), start=0, num_tokens=2, reaches_end=False)
    ends = ScheduledTokens(sequence=answer_of(), start=2, num_tokens=1, reaches_end=True)
    assert [row.position for row in rows_of(StepPlan(shares=(long, ends)))] == [3]


def test_bias_makes_a_token_certain_or_impossible():
    likeliest = int(LOGITS[0].argmax())
    assert draw(LOGITS, answer_of(temperature=0, logit_bias={7: 100.0})).tokens == [7]
    answers = [answer_of([0] * i, number=i, **ALL, logit_bias={likeliest: -100.0}) for i in range(200)]
    assert likeliest not in draw(LOGITS[:1].expand(200, -1), *answers).tokens


def test_no_end_is_drawn_before_min_tokens():
    end = int(LOGITS[0].argmax())
    kind = {"temperature": 0, "stop_ids": [end, VOCAB + 7], "min_tokens": 2}
    assert draw(LOGITS, answer_of([8], **kind)).tokens != [end]
    assert draw(LOGITS, answer_of([8, 8], **kind)).tokens == [end]
    wanted = {**kind, "stop_ids": [-1], "logit_bias": {VOCAB - 1: 100.0}}  # -1 is no token, nor the last
    assert draw(LOGITS, answer_of([8], **wanted)).tokens == [VOCAB - 1]


def test_logprobs_are_those_before_temperature_and_penalties():
    answer = answer_of([4], temperature=0.1, logit_bias={7: 100.0}, presence_penalty=2.0, num_logprobs=3)
    drawn = draw(LOGITS, answer_of(number=1, temperature=0), answer)
    assert drawn.tokens[1] == 7
    assert set(drawn.logprobs) == {1}
    expected = LOGITS[1].log_softmax(-1)
    assert drawn.logprobs[1].logprob == pytest.approx(expected[7].item(), abs=1e-5)
    assert set(drawn.logprobs[1].top) == set(expected.topk(3).indices.tolist())


def test_logits_are_left_as_they_are():
    before = LOGITS.clone()
    draw(
        LOGITS,
        *(answer_of([4], number=i, **ALL, repetition_penalty=2.0, logit_bias={1: 5.0}) for i in range(8)),
    )
    assert torch.equal(LOGITS, before)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_logits_of_a_diverged_model_fail_their_own_row_only(wrong):
    logits = LOGITS.clone()
    logits[1, 9] = wrong
    drawn = draw(logits, answer_of(temperature=0), answer_of(number=1, **ALL), answer_of(number=2, **ALL))
    assert drawn.failed == {1: NOT_FINITE}
    good = draw(LOGITS, answer_of(temperature=0), answer_of(number=1, **ALL), answer_of(number=2, **ALL))
    assert [drawn.tokens[i] for i in (0, 2)] == [good.tokens[i] for i in (0, 2)]


@pytest.mark.parametrize("kind", [ALL, {"temperature": 0}, {"temperature": 1.0, "top_p": 0.5}])
def test_an_answer_to_which_no_token_is_left_fails_alone(kind):
    nothing = answer_of(number=1, stop_ids=range(VOCAB), **{**kind, "min_tokens": 1})
    drawn = draw(LOGITS, answer_of(**ALL), nothing, answer_of(number=2, **ALL))
    assert (drawn.failed, drawn.refused) == ({}, {1: NOTHING_LEFT})
    good = draw(LOGITS, answer_of(**ALL), answer_of(number=1, **ALL), answer_of(number=2, **ALL))
    assert drawn.tokens[::2] == good.tokens[::2]


def test_probabilities_are_those_of_the_draws():
    kind = {**ALL, "repetition_penalty": 1.5, "logit_bias": {3: 2.0}, "top_k": 6}
    found = Sampler().probabilities(LOGITS[0], Row(answer_of([4, 9], **kind)))
    answers = [answer_of([4, 9], number=i, seed=i, **kind) for i in range(4000)]
    counts = torch.bincount(torch.tensor(draw(LOGITS[:1].expand(4000, -1), *answers).tokens), minlength=VOCAB)
    kept = found > 0
    assert int(kept.sum()) == 6
    assert counts[~kept].sum() == 0
    chi_square = ((counts - 4000 * found)[kept] ** 2 / (4000 * found)[kept]).sum()
    assert chi_square < 20.5  # 5 degrees of freedom, exceeded by chance once in a thousand; not random here


def test_an_ended_answer_is_forgotten():
    sampler = Sampler()
    sampled(sampler, LOGITS[:1], [Row(answer_of(**ALL))])
    assert sampler.num_known == 1
    sampler.forget(0)
    sampler.forget(0)
    assert sampler.num_known == 0


def test_numbers_are_uniform():
    numbers = uniforms([5] * 20_000, range(20_000))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01  # five standard errors
    assert abs(((numbers[1:] - 0.5) * (numbers[:-1] - 0.5)).mean()) < 0.003
    assert np.corrcoef(numbers, uniforms([6] * 20_000, range(20_000)))[0, 1] < 0.03


def test_only_allowed_tokens_are_drawn():
    rows = [answer_of(number=i, seed=i, allowed_token_ids=(3, 40), **ALL) for i in range(8)]
    sampler = Sampler()
    assert set(sampled(sampler, LOGITS, [Row(a) for a in rows]).tokens) == {3, 40}
    chances = sampler.probabilities(LOGITS[0], Row(rows[0]))
    assert chances[[3, 40]].sum() == pytest.approx(1.0)


def test_an_allowed_token_that_is_excluded_otherwise_leaves_nothing():
    draws = draw(LOGITS, answer_of(allowed_token_ids=(7,), stop_ids=(7,), min_tokens=2))
    assert draws.refused == {0: NOTHING_LEFT}


@pytest.mark.parametrize(
    ("drawn", "drafts", "is_excluded"),
    [
        ((), (), False),
        ((5,), (), False),
        ((5, 6), (), True),
        ((6, 5), (), False),
        ((5,), (6,), True),
        ((9,), (5, 6), True),
    ],
)
def test_the_end_of_a_bad_word_is_excluded_behind_its_beginning(drawn, drafts, is_excluded):
    likeliest = int(LOGITS[0].argmax())
    answer = answer_of(drawn, prompt=(5, 6), temperature=0, bad_words_ids=((5, 6, likeliest),))
    [token] = sampled(Sampler(), LOGITS[:1], [Row(answer, drafts)]).tokens
    assert (token != likeliest) == is_excluded


def test_a_bad_word_of_one_token_never_comes():
    best, second = LOGITS[0].topk(2).indices.tolist()
    assert draw(LOGITS, answer_of(temperature=0, bad_words_ids=((best,),))).tokens == [second]


def test_named_tokens_are_told_instead_of_the_likeliest():
    told = draw(LOGITS, answer_of(temperature=0, num_logprobs=3, logprob_token_ids=(4, 2))).logprobs[0]
    assert told.top == pytest.approx({token: LOGITS[0].log_softmax(-1)[token].item() for token in (4, 2)})
