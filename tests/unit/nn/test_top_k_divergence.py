"""The divergence from a teacher's top k against a plain one in float64, and TRL's."""

import pytest
import torch

from penstock.nn.head import OutputHead
from penstock.nn.top_k_divergence import top_k_divergence

TOKENS, HIDDEN, VOCAB = 23, 6, 50


def drawn(k, *, temperature=1.0):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64) * 2
    log_probs, ids = (teacher / temperature).log_softmax(1).topk(k, 1)
    return hidden, weight, ids, log_probs


def plain(hidden, weight, ids, log_probs, *, temperature=1.0, scaling=1.0):
    """TRL's: the mass outside the teacher's tokens is one more event of both."""
    student = (hidden @ weight.T / scaling / temperature).log_softmax(1).gather(1, ids)
    ours, theirs = (
        torch.cat((each, torch.log1p(-each.exp().sum(1, keepdim=True))), 1) for each in (student, log_probs)
    )
    return (theirs.exp() * (theirs - ours)).sum(1)


@pytest.mark.parametrize("tokens_at_once", [1, 7, None])
@pytest.mark.parametrize(("temperature", "scaling"), [(1.0, 1.0), (2.5, 8.0)])
@pytest.mark.parametrize("k", [1, 5])
def test_loss_and_gradients_are_those_of_the_plain_divergence(k, temperature, scaling, tokens_at_once):
    hidden, weight, ids, log_probs = drawn(k, temperature=temperature)
    head = OutputHead(weight, logits_scaling=scaling)
    total, each = top_k_divergence(
        hidden, head, ids, log_probs, temperature=temperature, tokens_at_once=tokens_at_once
    )
    expected = plain(hidden, weight, ids, log_probs, temperature=temperature, scaling=scaling)
    torch.testing.assert_close(each, expected.detach(), rtol=1e-11, atol=1e-12)
    found = torch.autograd.grad(total * 0.37, (hidden, weight))
    for ours, theirs in zip(found, torch.autograd.grad(expected.sum() * 0.37, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_with_all_tokens_it_is_the_divergence_of_the_distributions():
    hidden, weight, ids, log_probs = drawn(VOCAB)
    total, _ = top_k_divergence(hidden, OutputHead(weight), ids, log_probs.float())
    student = (hidden @ weight.T).log_softmax(1).gather(1, ids)
    expected = (log_probs.exp() * (log_probs - student)).sum()
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    found = torch.autograd.grad(total, (hidden, weight))
    for ours, theirs in zip(found, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_student_that_is_its_teacher_has_no_loss_and_no_gradient():
    hidden, weight, _, _ = drawn(5)
    log_probs, ids = (hidden @ weight.T).detach().log_softmax(1).topk(5, 1)
    total, _ = top_k_divergence(hidden, OutputHead(weight), ids, log_probs)
    assert abs(total.item()) < 1e-12
    for gradient in torch.autograd.grad(total, (hidden, weight)):
        assert gradient.abs().max() < 1e-12
