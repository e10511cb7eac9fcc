"""Penalties against transformers and OpenAI's formula; a tally that is kept up, against a recount."""

from collections import Counter

import numpy as np
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from penstock.engine.sampling.penalties import TokenCounts, penalise
from penstock.engine.sampling_params import Sampling


def tally_of(prompt, answer):
    tally = TokenCounts(prompt)
    tally.add(answer)
    return tally


def as_counts(tally):
    found = tally.tallied()
    return dict(zip(found.tokens.tolist(), found.counts.tolist(), strict=True))


def test_a_tally_kept_up_equals_a_recount():
    rng = np.random.default_rng(0)
    prompt, answer = rng.integers(0, 30, 20).tolist(), rng.integers(0, 60, 200).tolist()
    tally = TokenCounts(prompt)
    for n, token in enumerate(answer):
        guessed = rng.integers(0, 90, 3).tolist()  # and refused
        tally.add(guessed)
        tally.add(guessed, times=-1)
        tally.add([token])
        counts = Counter(answer[: n + 1])
        assert as_counts(tally) == {t: counts[t] for t in {*prompt, *answer[: n + 1]}}


def test_repetition_equals_that_of_transformers_over_prompt_and_answer():
    logits = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    texts = [[1, 2, 3, 3, 7], [4, 4, 9, 1, 30]]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor(texts), logits)
    found = logits.clone()
    sampling = Sampling(repetition_penalty=1.3)
    penalise(found, [(i, tally_of(t[:2], t[2:]).tallied(), sampling) for i, t in enumerate(texts)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_presence_and_frequency_count_the_answer_and_not_the_prompt():
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    scores = torch.zeros(2, 6, dtype=torch.float64)
    penalise(scores, [(1, tally_of([0, 1], [1, 2, 2, 2]).tallied(), sampling)])
    assert scores.tolist() == [[0.0] * 6, [0.0, -0.75, -1.25, 0.0, 0.0, 0.0]]


def test_rows_have_their_own_settings():
    scores = torch.ones(3, 4)
    tallied = tally_of([0], [1]).tallied()
    penalise(
        scores, [(0, tallied, Sampling(repetition_penalty=2.0)), (2, tallied, Sampling(presence_penalty=2.0))]
    )
    assert scores.tolist() == [[0.5, 0.5, 1.0, 1.0], [1.0] * 4, [1.0, -1.0, 1.0, 1.0]]


def test_what_is_excluded_stays_excluded():
    scores = torch.tensor([[-torch.inf, 1.0]])
    penalise(
        scores,
        [(0, tally_of([0], [0, 1]).tallied(), Sampling(repetition_penalty=2.0, frequency_penalty=-2.0))],
    )
    assert scores.tolist() == [[-torch.inf, 2.5]]
