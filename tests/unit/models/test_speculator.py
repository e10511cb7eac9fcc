"""The heads against their paper, written out plainly."""

import math

import pytest
import torch

from penstock.core.errors import ModelError
from penstock.models.speculator import Speculator, SpeculatorConfig

SIZES = {"vocab_size": 11, "emb_dim": 6, "inner_dim": 8, "n_predict": 3}


def drawn(**options):
    speculator = Speculator(SpeculatorConfig(**SIZES, **options))
    speculator.initialise(seed=0)
    return speculator.double()


def logits(speculator, hidden, tokens):
    for index, state in enumerate(speculator.states(hidden, tokens)):
        yield speculator.output(index)(state)


def plain(speculator, hidden, tokens):
    """As equation 1 of arXiv:2404.19124 with the factors of IBM's released speculators."""
    config = speculator.config
    keep = 0.5 ** (0.5 / config.n_predict)
    bring = math.sqrt((1 - keep**2) * config.inner_dim / 2)
    state = hidden
    if config.scale_input:
        state = hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() / math.sqrt(2)
    for head, token in zip(speculator.heads, tokens, strict=True):
        state = state @ head.project.weight.T + bring / keep * head.embed.weight[token]
        state = state / (state.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        state = state * head.norm.weight + head.norm.bias
        state = state * 0.5 * (1 + torch.erf(state / math.sqrt(2)))
        yield state @ head.output.weight.T


@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("tie_weights", [False, True])
@torch.no_grad()
def test_logits_are_those_of_the_paper(tie_weights, scale_input):
    speculator = drawn(tie_weights=tie_weights, scale_input=scale_input)
    for parameter in speculator.parameters():
        parameter += 0.1 * torch.randn_like(parameter)  # norms and shifts too
    hidden, tokens = torch.randn(5, 6).double(), torch.randint(0, 11, (3, 5))
    torch.testing.assert_close(
        torch.stack(list(logits(speculator, hidden, tokens))),
        torch.stack(list(plain(speculator, hidden, tokens))),
    )


@torch.no_grad()
def test_each_head_takes_the_guess_of_the_one_before():
    speculator, hidden, token = drawn(), torch.randn(5, 6).double(), torch.arange(5)
    guesses = speculator.guesses(hidden, token, num=3)
    taken = torch.stack([token, guesses[:, 0], guesses[:, 1]])
    expected = [scores.argmax(-1) for scores in logits(speculator, hidden, taken)]
    assert guesses.tolist() == torch.stack(expected, 1).tolist()
    assert speculator.guesses(hidden, token, num=2).tolist() == guesses[:, :2].tolist()


def test_tied_heads_share_all_but_the_first_projection():
    sizes = {tie: sum(p.numel() for p in drawn(tie_weights=tie).parameters()) for tie in (False, True)}
    shared = 2 * 11 * 8 + 2 * 8  # embedding, output, norm
    assert sizes == {True: shared + 6 * 8 + 8 * 8, False: 3 * shared + 6 * 8 + 2 * 8 * 8}


@pytest.mark.parametrize("wrong", [{"emb_dim": None}, {"vocab_size": "many"}, {"n_predict": 0}])
def test_a_config_without_sizes_is_refused(wrong):
    with pytest.raises(ModelError, match=next(iter(wrong))):
        SpeculatorConfig.from_json({**SIZES, **wrong})


def test_the_first_published_configs_neither_tie_nor_scale():
    config = SpeculatorConfig.from_json({**SIZES, "inner_dim": 0})
    assert (config.tie_weights, config.scale_input, config.inner_dim) == (False, False, 6)
