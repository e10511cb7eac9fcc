"""An answer with drafts is the answer without: tokens, log-probabilities and end, however bad the guesses."""

import itertools
import random
from typing import ClassVar

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.engine import Engine
from penstock.engine.model_runner.capacity import Capacity
from penstock.engine.model_runner.interface import StepOutput
from penstock.engine.request import Request
from penstock.engine.sampling.output_processor import OutputProcessor
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.sampling_params import Sampling
from penstock.engine.scheduling.blocks import BlockPool
from penstock.engine.scheduling.scheduler import Scheduler, StepLimits
from penstock.engine.speculation.draft_length import DraftLength
from penstock.engine.speculation.ngram import NgramDrafter
from penstock.engine.speculation.speculation import Speculation
from tests.examples import examples
from tests.hashing_model import VOCAB as STATES
from tests.hashing_model import HashingModel, step_hash

VOCAB = 5
LOGITS = torch.randn(STATES, VOCAB, generator=torch.Generator().manual_seed(0))


class Runner:
    """Logits that depend on every token before, read out of the cache as a network reads it."""

    adapters: ClassVar = {}
    num_new_tokens: ClassVar = {}

    def __init__(self, *, num_blocks):
        self._model = HashingModel(num_blocks=num_blocks, block_size=4)

    def run(self, batch, settings=None, *, samples=False):  # noqa: ARG002
        return StepOutput(torch.zeros(len(batch.token_ids), 1), LOGITS[self._model.run(batch)])

    def close(self):
        pass


class Hostile:
    """Guesses anything, as many as it likes; `fail_after` that many steps it raises."""

    def __init__(self, seed, *, fail_after=10**9):
        self._random = random.Random(seed)
        self._left = fail_after
        self.known = set()

    def propose(self, done, wanted):
        self._left -= 1
        assert self._left >= 0, "a drafter that fails"
        self.known |= {share.sequence.id for share, num in zip(done.plan.shares, wanted, strict=True) if num}
        return [
            tuple(self._random.randrange(VOCAB) for _ in range(self._random.randint(0, num)))
            for num in wanted
        ]

    def forget(self, sequence):
        self.known.discard(sequence.id)


class NoTokenTwice:
    """A grammar: no token follows itself. Drafts that break it lead nowhere, as in a real matcher."""

    def check(self, request):
        pass

    hold = release = check

    def matcher(self, request):
        assert request.grammar == "no token twice"
        return self

    def allowed(self, tokens, drafts):
        text = [*tokens, *drafts]
        if any(text[i] == text[i + 1] for i in range(len(text) - 1)):
            return "a token follows itself"
        return np.array([token != (text[-1:] or [None])[0] for token in range(VOCAB)])


def engine(drafter=None, *, num_blocks=64, adapt=False, most=4, tokens_per_step=24):
    limits = StepLimits(max_sequences=6, tokens_per_step=tokens_per_step, block_size=4)
    capacity = Capacity(
        context=num_blocks * 4, vocab_size=VOCAB, num_blocks=num_blocks, block_size=4, tokens_per_step=24,
        max_sequences=6,
    )  # fmt: skip
    return Engine(
        Runner(num_blocks=num_blocks),
        Scheduler(limits, BlockPool(num_blocks)),
        token_sampler=OutputProcessor(Sampler(NoTokenTwice())),
        capacity=capacity,
        text_processor=None,
        grammars=NoTokenTwice(),
        drafting=None if drafter is None else Speculation(drafter, DraftLength(most=most, adapt=adapt)),
    )


def answers(run, requests):
    """Each answer's tokens, log-probabilities and end."""
    ids = [run.add(request) for request in requests]
    told = {}
    while run.has_work:
        for delta in run.step():
            tokens, logprobs, _ = told.get((delta.request_id, delta.answer), ((), (), None))
            told[delta.request_id, delta.answer] = (
                tokens + delta.token_ids,
                logprobs + tuple((one.token, round(one.logprob, 5)) for one in delta.logprobs),
                delta.finish,
            )
        run.scheduler.check()
    assert run.stats().used_blocks == 0
    return [
        told[number, answer]
        for number, r in zip(ids, requests, strict=True)
        for answer in range(r.num_answers)
    ]


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    top_p=st.sampled_from([0.7, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    logit_bias=st.sampled_from([{}, {2: 1.5}]),
    min_tokens=st.integers(min_value=0, max_value=6),
    num_logprobs=st.sampled_from([None, 2]),
    seed=st.integers(min_value=0, max_value=99),
)
REQUESTS = st.builds(
    Request,
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9).map(tuple),
    max_tokens=st.integers(min_value=1, max_value=20),
    sampling=SAMPLINGS,
    stop_ids=st.sampled_from([frozenset(), frozenset({3}), frozenset({0, 3})]),
    num_answers=st.integers(min_value=1, max_value=2),
    grammar=st.sampled_from([None, "no token twice"]),
)


@examples(60)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=7),
    num_blocks=st.integers(min_value=8, max_value=30),
    tokens_per_step=st.integers(min_value=7, max_value=30),
    seed=st.integers(),
)
def test_an_answer_does_not_depend_on_drafts(requests, num_blocks, tokens_per_step, seed):
    expected = answers(engine(), requests)
    for drafter in (Hostile(seed), NgramDrafter(), Hostile(seed, fail_after=3)):
        run = engine(drafter, num_blocks=num_blocks, tokens_per_step=tokens_per_step)
        assert answers(run, requests) == expected
        assert not isinstance(drafter, Hostile) or not drafter.known


def test_tokens_come_as_often_as_they_are_probable():
    """Pearson's chi-square of three tokens in a row, of which drafts were made for the last two."""
    prompt, num = (1, 2), 4000
    requests = [
        Request(prompt=prompt, max_tokens=3, sampling=Sampling(temperature=1.0, top_p=1.0, seed=seed))
        for seed in range(num)
    ]
    run = engine(Hostile(0), num_blocks=200)
    seen = [tokens for tokens, _, _ in answers(run, requests)]
    chi_square, cells = 0.0, 0
    for tokens in itertools.product(range(VOCAB), repeat=3):
        expected = num * probability(prompt, tokens)
        if expected >= 5:
            cells += 1
            chi_square += (seen.count(tokens) - expected) ** 2 / expected
    assert cells > 60
    # its mean is about the number of cells, its deviation sqrt(2 * cells): five of these for a fixed seed
    assert chi_square < cells + 5 * (2 * cells) ** 0.5
    counts = run.stats().counts
    assert 0.1 < counts.drafts_accepted / counts.drafts < 0.4  # guesses at random, among five tokens


def probability(prompt, tokens):
    """The product of what the logits say, token by token, without a cache."""
    state = -1
    for token in prompt:
        state = step_hash(state, token)
    chance = 1.0
    for token in tokens:
        chance *= float(LOGITS[state % STATES].softmax(0)[token])
        state = step_hash(state, token)
    return chance


def test_right_guesses_are_counted_and_save_steps():
    request = Request(prompt=(1, 2), max_tokens=20, sampling=Sampling(temperature=0.0))
    ((expected, _, _),) = answers(engine(), [request])

    class Knows:
        def propose(self, done, wanted):
            (share,), (num,) = done.plan.shares, wanted
            drawn = share.sequence.num_sampled
            return [tuple(expected[drawn : drawn + num])]

        def forget(self, sequence):
            pass

    run = engine(Knows())
    assert answers(run, [request])[0][0] == expected
    counts = run.stats().counts
    assert counts.drafts == counts.drafts_accepted == 15
    assert counts.steps == 5  # the prompt's step brings one token, four of five bring five; the last is cut
