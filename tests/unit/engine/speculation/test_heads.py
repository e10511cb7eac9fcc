"""Heads are asked from the state that the last token was drawn from, whatever else was in the step."""

import numpy as np
import torch

from penstock.engine.model_runner.batch import StepBatch
from penstock.engine.request import Request
from penstock.engine.scheduling.sequence import ScheduledTokens, Sequence, StepPlan
from penstock.engine.speculation.open import HeadsDrafter
from penstock.engine.speculation.speculation import CompletedStep
from penstock.models.speculator import Speculator, SpeculatorConfig


def share(number, *, start, num_tokens, drafts=()):
    tokens = list(range(start + num_tokens - len(drafts)))
    request = Request(prompt=tuple(tokens), max_tokens=9)
    sequence = Sequence(id=number, request_id=number, answer=0, request=request, tokens=tokens)
    return ScheduledTokens(
        sequence=sequence, start=start, num_tokens=num_tokens, reaches_end=True, drafts=drafts
    )


def done(shares, sampled):
    sizes = [share.num_tokens for share in shares]
    none = np.zeros(0)
    starts = np.cumsum([0, *sizes])
    return CompletedStep(
        plan=StepPlan(shares=tuple(shares)),
        batch=StepBatch(
            token_ids=none,
            positions=none,
            slots=none,
            query_starts=starts,
            lengths=none,
            block_tables=none,
            logit_rows=none,
            adapters=none,
        ),
        hidden=torch.arange(sum(sizes) * 4.0).view(-1, 4).sin(),
        sampled=sampled,
        model_s=1.0,
    )


def test_guesses_come_from_the_state_of_the_last_token_that_stood():
    speculator = Speculator(SpeculatorConfig(vocab_size=50, emb_dim=4, inner_dim=8, n_predict=3))
    speculator.initialise(seed=0)
    shares = [
        share(0, start=5, num_tokens=1),
        share(1, start=5, num_tokens=4, drafts=(7, 8, 9)),  # of which one stood
        share(2, start=0, num_tokens=6),  # a prompt that is not done
        share(3, start=4, num_tokens=3),  # one that is
    ]
    step = done(shares, [[3], [7, 4], [], [6]])
    assert step.num_kept == [1, 2, 6, 3]
    found = HeadsDrafter(speculator).propose(step, [2, 3, 0, 9])
    with torch.no_grad():
        expected = speculator.guesses(step.hidden[[0, 2, 13]], torch.tensor([3, 4, 6]), num=3).tolist()
    assert found == [tuple(expected[0][:2]), tuple(expected[1]), (), tuple(expected[2])]


def test_where_nothing_is_wanted_nothing_is_guessed():
    speculator = Speculator(SpeculatorConfig(vocab_size=50, emb_dim=4, inner_dim=8, n_predict=3))
    assert HeadsDrafter(speculator).propose(done([share(0, start=5, num_tokens=1)], [[3]]), [0]) == [()]
