"""Log-probabilities of single tokens against torch's own, in float64, and what they never hold."""

import pytest
import torch

from penstock.nn.head import OutputHead
from penstock.nn.token_log_probs import token_log_probs
from penstock.testing.step_memory import LiveBytes
from tests.head_adapters import adapted, drawn_adapter

TOKENS, HIDDEN, VOCAB = 23, 6, 50


def drawn(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[::4] = -100
    return hidden, weight, labels


def plain(hidden, weight, labels, *, scaling=1.0):
    found = torch.log_softmax(hidden @ weight.T / scaling, 1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(labels == -100, 0.0, found)


@pytest.mark.parametrize("tokens_at_once", [1, 7, 23, 1000, None])
@pytest.mark.parametrize("scaling", [1.0, 8.0])
def test_values_and_gradients_of_any_function_are_those_of_torch(tokens_at_once, scaling):
    hidden, weight, labels = drawn()
    found = token_log_probs(
        hidden, OutputHead(weight, logits_scaling=scaling), labels, tokens_at_once=tokens_at_once
    )
    expected = plain(hidden, weight, labels, scaling=scaling)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    ours, theirs = (
        torch.autograd.grad((each[:9].sum() * each[9:].sum()).tanh(), (hidden, weight))
        for each in (found / 50, expected / 50)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("has_magnitudes", [False, True])
def test_an_adapter_of_the_output_matrix_gets_the_gradients_of_torch(has_magnitudes):
    hidden, weight, labels = drawn()
    adapter = drawn_adapter(has_magnitudes=has_magnitudes)
    given = [hidden, weight, adapter.a, adapter.b, *([adapter.magnitude] if has_magnitudes else [])]
    found = token_log_probs(hidden, OutputHead(weight, 8.0, adapter=adapter), labels, tokens_at_once=7)
    logits = adapted(hidden, weight, adapter) / 8
    expected = torch.log_softmax(logits, 1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    expected = torch.where(labels == -100, 0.0, expected)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    ours, theirs = (torch.autograd.grad((each / 50).sum().tanh(), given) for each in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient_and_the_other_its_own(frozen):
    hidden, weight, labels = drawn()
    (hidden if frozen == "hidden" else weight).requires_grad_(requires_grad=False)
    token_log_probs(hidden, OutputHead(weight), labels).sum().backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_a_batch_without_a_learned_token_has_gradients_of_zero():
    hidden, weight, labels = drawn()
    found = token_log_probs(hidden, OutputHead(weight), torch.full_like(labels, -100))
    assert not found.any()
    found.sum().backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_the_logits_of_all_tokens_are_never_held():
    tokens, vocab = 4096, 2048
    hidden = torch.zeros(tokens, 4, requires_grad=True)
    weight = torch.zeros(vocab, 4, requires_grad=True)
    with LiveBytes() as live:
        token_log_probs(
            hidden, OutputHead(weight), torch.zeros(tokens, dtype=torch.int64), tokens_at_once=256
        ).sum().backward()
    assert live.peak < tokens * vocab  # a quarter of all logits in float32
