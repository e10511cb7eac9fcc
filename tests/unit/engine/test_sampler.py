"""The sampler: filters against transformers, frequencies against softmax, repeatability."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from penstock.core.errors import ModelError
from penstock.engine.sampler import probabilities, sample, uniform
from penstock.engine.sampling import GREEDY, Sampling

LOGITS = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 2


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [None, 1, 5, 100])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 1.0])
def test_probabilities_equal_those_of_transformers(temperature, top_k, top_p):
    scores = TemperatureLogitsWarper(temperature)(None, LOGITS[None].double())
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    found = probabilities(LOGITS, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    torch.testing.assert_close(found, scores[0].softmax(0), rtol=0, atol=1e-12)


def test_ties_at_the_last_of_top_k_all_stay():
    found = probabilities(torch.tensor([1.0, 2.0, 2.0, 0.0]), Sampling(temperature=1.0, top_k=1, top_p=1.0))
    assert found.tolist() == [0.0, 0.5, 0.5, 0.0]


def test_tokens_are_drawn_as_often_as_they_are_probable():
    sampling = Sampling(temperature=1.0, top_k=8, top_p=0.97)
    expected, num_draws = probabilities(LOGITS, sampling), 20_000
    drawn = torch.tensor([sample(LOGITS, sampling, position=i) for i in range(num_draws)])
    counts = torch.bincount(drawn, minlength=40).double()
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    chi_square = ((counts - num_draws * expected)[kept] ** 2 / (num_draws * expected)[kept]).sum()
    assert chi_square < 24.3  # 7 degrees of freedom, exceeded by chance once in a thousand; not random here


def test_a_draw_depends_on_seed_and_position_only():
    sampling = Sampling(temperature=1.0, top_p=1.0)
    draws = [sample(LOGITS, sampling, position=i) for i in range(50)]
    assert [sample(LOGITS, sampling, position=i) for i in reversed(range(50))] == draws[::-1]
    assert draws != [
        sample(LOGITS, Sampling(temperature=1.0, top_p=1.0, seed=1), position=i) for i in range(50)
    ]


def test_temperature_zero_takes_the_likeliest():
    assert sample(LOGITS, GREEDY, position=3) == LOGITS.argmax()


def test_a_number_at_the_very_end_still_draws_a_possible_token(monkeypatch):
    monkeypatch.setattr("penstock.engine.sampler.uniform", lambda *_: 1.0)  # what rounding up amounts to
    logits = torch.tensor([0.0, 1.0, -torch.inf, -torch.inf])
    assert sample(logits, Sampling(temperature=1.0, top_p=1.0), position=0) == 1


def test_uniform_numbers_are_uniform():
    numbers = torch.tensor([uniform(0, i) for i in range(20_000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01  # five standard errors
    assert abs((numbers[1:] - 0.5) @ (numbers[:-1] - 0.5)) / 20_000 < 0.003


def test_logits_of_a_diverged_model_are_an_error():
    with pytest.raises(ModelError, match="not finite"):
        sample(torch.tensor([0.0, torch.nan]), GREEDY, position=0)
