"""The loss without logits and its gradients against torch's own, in float64."""

import pytest
import torch
from torch.nn import functional

from penstock.nn.cross_entropy import cross_entropy
from penstock.nn.head import OutputHead

NEAR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of a gradient's norm; bfloat16 rounds each product to 8 bits."""


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("tokens_at_once", [37, None], ids=["37 tokens at once", "as many as it takes"])
def test_loss_and_gradients_are_those_of_logits_in_float64(tokens_at_once, dtype, device, is_tiny):
    tokens, size, vocab = (101, 48, 301) if is_tiny else (2003, 768, 50_257)
    hidden = torch.randn(tokens, size, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, size, device=device) / size**0.5).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), device=device)
    labels[::5] = -100
    total, each = cross_entropy(
        hidden, OutputHead(weight, logits_scaling=1.5), labels, tokens_at_once=tokens_at_once
    )
    found = torch.autograd.grad(total, (hidden, weight))

    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    expected = functional.cross_entropy(exact_hidden @ exact_weight.T / 1.5, labels, reduction="none")
    exact = torch.autograd.grad(expected.sum(), (exact_hidden, exact_weight))
    assert total.item() == pytest.approx(expected.sum().item(), rel=NEAR[dtype])
    torch.testing.assert_close(each.double(), expected.detach(), rtol=NEAR[dtype], atol=5 * NEAR[dtype])
    for what, ours, theirs in zip(("hidden", "weight"), found, exact, strict=True):
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < NEAR[dtype], f"{what}: {error:.2g} of its norm"
