"""Filters against transformers, draws against the probabilities they stand for."""

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from penstock.engine.sampling.filters import choose, probabilities, weights
from penstock.engine.sampling_params import GREEDY, Sampling
from penstock.nn import native

LOGITS = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 2
WIDE = torch.randn(3000, generator=torch.Generator().manual_seed(1))
"""Flat enough that nuclei reach beyond the tokens that are ordered first, and then."""
ALL = Sampling(temperature=1.0, top_p=1.0)
SETTINGS = [
    ALL,
    Sampling(temperature=0.3, top_p=1.0),
    Sampling(temperature=1.0, top_p=1.0, top_k=5),
    Sampling(temperature=1.0, top_p=1.0, top_k=100),
    Sampling(temperature=1.0, top_p=0.01),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=1.7, top_p=0.9, top_k=2000),
    Sampling(temperature=1.0, top_p=1.0, min_p=0.1),
    Sampling(temperature=1.3, top_p=0.8, top_k=70, min_p=0.02),
]


@pytest.fixture(params=["operator", "plain"], autouse=True)
def route(request, monkeypatch):
    """Both ways to draw are held to the same."""
    if request.param == "plain":
        monkeypatch.setattr(native, "is_available", lambda: False)
    elif not native.is_available():
        pytest.skip("no C++ compiler here")
    return request.param


def evenly(count):
    return (np.arange(count) + 0.5) / count


def shares_of(logits, sampling, *, count):
    """Return how often each token is drawn, the numbers being spread evenly."""
    drawn = choose(logits.expand(count, -1), [sampling] * count, evenly(count))
    return torch.bincount(drawn, minlength=len(logits)).double() / count


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [None, 1, 5, 100])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_probabilities_equal_those_of_transformers(temperature, top_k, top_p, min_p):
    scores = TemperatureLogitsWarper(temperature)(None, LOGITS[None].double())
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(None, scores)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    torch.testing.assert_close(probabilities(LOGITS, sampling), scores[0].softmax(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("logits", [LOGITS, WIDE], ids=len)
@pytest.mark.parametrize("sampling", SETTINGS)
def test_tokens_are_drawn_as_often_as_they_are_probable(logits, sampling):
    count = 2000
    expected = probabilities(logits, sampling)
    found = shares_of(logits, sampling, count=count)
    assert (found[expected == 0] == 0).all()
    # evenly spread numbers hit a token's stretch as often as it is long, but for one at each of its ends
    assert (found - expected).abs().max() <= 1.01 / count


def test_random_numbers_draw_by_chance():
    sampling, count = Sampling(temperature=1.0, top_k=8, top_p=0.97), 20_000
    expected = probabilities(LOGITS, sampling)
    numbers = np.random.default_rng(0).random(count)
    counts = torch.bincount(choose(LOGITS.expand(count, -1), [sampling] * count, numbers), minlength=40)
    kept = expected > 0
    chi_square = ((counts - count * expected)[kept] ** 2 / (count * expected)[kept]).sum()
    assert chi_square < 24.3  # 7 degrees of freedom, exceeded by chance once in a thousand; not random here


def test_a_row_does_not_depend_on_its_neighbours():
    settings = [*SETTINGS, GREEDY]
    numbers = np.random.default_rng(0).random(len(settings))
    rows = WIDE.repeat(len(settings), 1)
    together = choose(rows, settings, numbers).tolist()
    alone = [int(choose(rows[i : i + 1], [s], numbers[i : i + 1])) for i, s in enumerate(settings)]
    assert together == alone
    turned = choose(rows, settings[::-1], numbers[::-1].copy()).tolist()
    assert turned[::-1] == together


def test_ties_at_the_last_of_top_k_all_stay():
    sampling = Sampling(temperature=1.0, top_k=1, top_p=1.0)
    logits = torch.tensor([1.0, 2.0, 2.0, 0.0])
    assert probabilities(logits, sampling).tolist() == [0.0, 0.5, 0.5, 0.0]
    assert shares_of(logits, sampling, count=10).tolist() == [0.0, 0.5, 0.5, 0.0]


def test_ties_of_top_k_reach_beyond_the_tokens_ordered_first():
    logits = torch.cat((torch.ones(500), torch.zeros(500)))
    found = shares_of(logits, Sampling(temperature=1.0, top_k=3, top_p=1.0), count=1000)
    torch.testing.assert_close(found, probabilities(logits, Sampling(temperature=1.0, top_k=3, top_p=1.0)))


def test_excluded_tokens_are_never_drawn():
    logits = WIDE.clone()
    logits[10:] = -torch.inf
    for sampling in SETTINGS:
        assert shares_of(logits, sampling, count=200)[10:].sum() == 0


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53, 1.0])  # 1.0 is what rounding up amounts to
@pytest.mark.parametrize("sampling", SETTINGS)
def test_a_number_at_the_very_end_still_draws_a_possible_token(number, sampling):
    logits = torch.full((1000,), -torch.inf)
    logits[[3, 300]] = torch.tensor([0.0, 0.1])
    drawn = choose(logits[None], [sampling], np.array([number]))
    assert probabilities(logits, sampling)[drawn] > 0


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-5])
def test_a_temperature_near_zero_is_greedy(temperature):
    numbers = np.array([0.999])
    for top_p in (1.0, 0.9):
        drawn = choose(WIDE[None], [Sampling(temperature=temperature, top_p=top_p)], numbers)
        assert int(drawn) == int(WIDE.argmax())


def test_weights_are_powers_of_two_that_fall_strictly():
    lacking = torch.arange(2**21 + 9, dtype=torch.float32) * 2.0**-20  # from 0 to beyond two halvings
    found = weights(-lacking[None], torch.zeros(1, 1), torch.ones(1, 1))[0]
    torch.testing.assert_close(found.double(), 2.0 ** (43 - lacking.double()), rtol=2e-7, atol=0)
    assert (found.diff() < 0).all()
    assert found[:: 2**20].tolist() == [2**43, 2**42, 2**41]


def test_weights_fall_strictly_from_each_number_to_the_next():
    for first in (
        0,
        2**24 - 2**16,
    ):  # at the beginning and the end of a halving, every number that is told apart
        lacking = torch.arange(first, first + 2**16 + 2).double() * 2.0**-24
        found = weights(-lacking[None].float(), torch.zeros(1, 1), torch.ones(1, 1))[0]
        assert (found[lacking.float().diff(prepend=torch.tensor([-1.0])) > 0].diff() < 0).all()


def test_of_equals_at_the_edge_of_top_p_the_first_stay():
    logits = torch.tensor([0.0, 1.0, 0.0, 0.0, -torch.inf, 1.0]).bfloat16()
    # both ones weigh e, the zeros 1: two of the zeros are needed
    sampling = Sampling(temperature=1.0, top_p=(2 * np.e + 1.5) / (2 * np.e + 3))
    found = shares_of(logits, sampling, count=1000)
    torch.testing.assert_close(found, probabilities(logits, sampling), rtol=0, atol=2e-3)
    assert (found > 0).tolist() == [True, True, True, False, False, True]


def test_a_row_that_nothing_can_be_drawn_from_says_so():
    logits = LOGITS.repeat(5, 1)
    logits[1, 3] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    logits[4, 3] = -torch.nan
    for sampling in (GREEDY, *SETTINGS):
        assert choose(logits, [sampling] * 5, [0.5] * 5).tolist()[1:] == [-1] * 4
    assert choose(logits, None).tolist() == [int(LOGITS.argmax()), *[-1] * 4]


def test_the_likeliest_is_the_lowest_of_equals():
    logits = torch.full((2, 1000), -3.0)
    logits[0, [600, 601]] = 0.0
    logits[1, [700, 20]] = torch.tensor([-0.0, 0.0])  # equal too
    assert choose(logits, None).tolist() == [600, 20]
    assert choose(logits.T.contiguous().T, None).tolist() == [600, 20]  # however it lies


def test_the_likeliest_token_of_float64_is_the_same_beside_rows_that_are_sampled():
    logits = torch.zeros(2, 40, dtype=torch.float64)
    logits[0, 7] = 1.0
    logits[0, 30] = 1.0 + 1e-12  # equal in float32, where lower ids come first
    greedy = choose(logits, None).tolist()[0]
    beside = choose(logits, [GREEDY, Sampling()], [0.0, 0.5]).tolist()[0]
    assert greedy == beside == 7
