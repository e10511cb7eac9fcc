"""Tokens drawn on the device against those drawn on the CPU, and against the probabilities they stand for."""

import numpy as np
import pytest
import torch

from penstock.engine.sampling.filters import choose, choose_plain, probabilities, settings_tensor
from penstock.engine.sampling.sampler import logprobs_of
from penstock.engine.sampling_params import GREEDY, Sampling

SETTINGS = [
    GREEDY,
    Sampling(temperature=0.7, top_p=1.0),
    Sampling(temperature=1.0, top_p=0.93),
    Sampling(temperature=1.4, top_p=1.0, top_k=77),
    Sampling(temperature=0.9, top_p=0.8, top_k=50, min_p=0.02),
    Sampling(temperature=1.1, top_p=1.0, min_p=0.3),
]
VOCAB = {"tiny": 3001, "full": 128_255}


def words_of(sampling):
    names = ("temperature", "top_k", "top_p", "min_p")
    return ", ".join(f"{name} {getattr(sampling, name)}" for name in names)


def logits_of(rows, device, is_tiny):
    generator = torch.Generator().manual_seed(3)
    vocab = VOCAB["tiny" if is_tiny else "full"]
    return (3 * torch.randn(rows, vocab, generator=generator)).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_tokens_are_drawn_as_on_a_cpu(dtype, device, is_tiny):
    rows = 8 * len(SETTINGS)
    logits = logits_of(rows, device, is_tiny).to(dtype)
    numbers = np.random.default_rng(0).random(rows)
    settings = SETTINGS * 8
    found = choose(logits, settings, numbers)
    wanted = choose_plain(logits.cpu(), settings_tensor(settings, numbers, vocab=logits.shape[1]))
    assert found.device.type == device.type
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("sampling", SETTINGS[1:], ids=words_of)
def test_tokens_are_drawn_as_often_as_they_are_probable(sampling, device, is_tiny):
    """Numbers spread evenly hit a token's stretch as often as it is long, but for one at each end."""
    logits = logits_of(1, device, is_tiny)[0, :3001]
    count = 1000 if is_tiny else 4000
    drawn = choose(logits.expand(count, -1), [sampling] * count, (np.arange(count) + 0.5) / count).cpu()
    assert ((drawn >= 0) & (drawn < len(logits))).all()  # of any size where nothing computes
    shares = torch.bincount(drawn, minlength=len(logits)).double().to(device) / count
    expected = probabilities(logits, sampling)
    assert (shares[expected == 0] == 0).all()
    assert (shares - expected).abs().max() <= 2 / count


def test_logprobs_are_those_of_float64(device, is_tiny):
    logits = logits_of(3, device, is_tiny)
    expected = logits.double().log_softmax(-1)
    for row, found in enumerate(logprobs_of(logits, [11, 500, 2999], num_top=7)):
        assert found.logprob == pytest.approx(expected[row, found.token].item(), abs=1e-4)
        assert list(found.top) == expected[row].topk(7).indices.tolist()


def test_what_cannot_be_drawn_from_says_so(device):
    logits = torch.randn(3, 999, device=device)
    logits[0, 7], logits[1] = torch.nan, -torch.inf
    for sampling in SETTINGS:
        assert choose(logits, [sampling] * 3, [0.5] * 3).tolist()[:2] == [-1, -1]
