"""Initial weights: the hash, the distribution, and independence of names and chunks."""

import numpy as np
import pytest
import torch

from penstock.core import rng
from penstock.models.decoder.model import Decoder
from penstock.nn import init, random_bits
from penstock.nn.random_bits import mix64
from tests.families import small_llama

CONFIG = small_llama(attention_bias=True)


def built(seed=0):
    with torch.device("meta"):
        model = Decoder(CONFIG)
    model.to_empty(device="cpu")
    init.init_weights(model, seed=seed)
    return model


def test_the_hash_is_that_of_core_rng():
    values = torch.randint(-(2**63), 2**63 - 1, (1000,), generator=torch.Generator().manual_seed(0))
    expected = rng.mix64(values.numpy().view(np.uint64))
    assert np.array_equal(mix64(values).numpy().view(np.uint64), expected)


def test_values_are_normal_with_folded_tails():
    values = init.normal(torch.arange(400_000), rng.key_of(0, "test"))
    # standard errors at this size: 0.0016 for the mean, 0.0011 for the standard deviation
    assert abs(values.mean()) < 0.007
    assert abs(values.std() - 0.9954) < 0.005  # of a normal folded at 3: quadrature gives 0.9954
    assert values.abs().max() <= 3
    quantiles = torch.quantile(values, torch.tensor([0.1587, 0.5, 0.8413], dtype=torch.float64))
    torch.testing.assert_close(quantiles, torch.tensor([-1.0, 0, 1]).double(), rtol=0, atol=0.012)


def test_neighbours_are_not_correlated():
    values = init.normal(torch.arange(400_000), rng.key_of(0, "test"))
    for lag in (1, 2, 32, 1024):
        assert abs((values[lag:] * values[:-lag]).mean()) < 0.008


def test_a_value_depends_on_its_index_only(monkeypatch):
    whole = built()
    monkeypatch.setattr(random_bits, "_CHUNK", 7)
    for (name, a), b in zip(whole.named_parameters(), built().parameters(), strict=True):
        assert torch.equal(a, b), name


def test_seed_and_name_change_every_matrix():
    first, second = built(seed=0), built(seed=1)
    assert not torch.equal(first.embed.weight, second.embed.weight)
    assert not torch.equal(first.layers[0].mlp.up.weight, first.layers[1].mlp.up.weight)
    assert not torch.equal(first.layers[0].mlp.up.weight, first.layers[0].mlp.gate.weight)


def test_norms_start_at_one_biases_at_zero_and_matrices_at_their_scale():
    for name, parameter in built().named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            scale = 0.01 if name.endswith(("attention.output.weight", "mlp.down.weight")) else 0.02
            assert parameter.detach().std() == pytest.approx(0.9954 * scale, rel=0.1), name


def test_known_values_never_change():
    # a new release that draws other weights breaks every run that is compared with an older one
    values = init.normal(torch.arange(4), rng.key_of(0, "init", "embed.weight"))
    torch.testing.assert_close(values, KNOWN, rtol=0, atol=1e-12)


KNOWN = torch.tensor(
    [0.1074474083137051, -0.1850617897968593, 0.3074781563177214, -0.39453988105989257], dtype=torch.float64
)
