"""The loss without logits against torch's own, in float64, and what it never holds."""

import pytest
import torch
from torch.nn import functional

from penstock.nn.cross_entropy import (
    _losses,
    _losses_to_compile,
    _product,
    _product_to_compile,
    cross_entropy,
)
from penstock.nn.head import OutputHead, Whole
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
    return functional.cross_entropy(hidden @ weight.T / scaling, labels, reduction="none")


@pytest.mark.parametrize("tokens_at_once", [1, 7, 23, 1000, None])
@pytest.mark.parametrize("scaling", [1.0, 8.0])
def test_loss_and_gradients_are_those_of_the_plain_loss(tokens_at_once, scaling):
    hidden, weight, labels = drawn()
    head = OutputHead(weight, logits_scaling=scaling)
    total, each = cross_entropy(hidden, head, labels, tokens_at_once=tokens_at_once)
    expected = plain(hidden, weight, labels, scaling=scaling)
    torch.testing.assert_close(total, expected.sum(), rtol=1e-14, atol=0)
    torch.testing.assert_close(each, expected.detach(), rtol=1e-13, atol=1e-13)
    found = torch.autograd.grad(total * 0.37, (hidden, weight))
    for ours, theirs in zip(found, torch.autograd.grad(expected.sum() * 0.37, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("tokens_at_once", [7, 1000])
@pytest.mark.parametrize("has_magnitudes", [False, True])
def test_an_adapter_of_the_output_matrix_gets_the_gradients_of_the_plain_loss(tokens_at_once, has_magnitudes):
    hidden, weight, labels = drawn()
    weight.requires_grad_(requires_grad=False)
    adapter = drawn_adapter(has_magnitudes=has_magnitudes)
    given = [hidden, adapter.a, adapter.b, *([adapter.magnitude] if has_magnitudes else [])]
    total, each = cross_entropy(
        hidden, OutputHead(weight, 8.0, adapter=adapter), labels, tokens_at_once=tokens_at_once
    )
    expected = functional.cross_entropy(adapted(hidden, weight, adapter) / 8, labels, reduction="none")
    torch.testing.assert_close(each, expected.detach(), rtol=1e-6, atol=1e-6)
    found = torch.autograd.grad(total * 0.37, given)
    for ours, theirs in zip(found, torch.autograd.grad(expected.sum() * 0.37, given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_labels_in_32_bits_give_the_same_loss_and_gradients():
    hidden, weight, labels = drawn()
    found = [cross_entropy(hidden, OutputHead(weight), given)[0] for given in (labels, labels.int())]
    assert found[0] == found[1]
    gradients = [torch.autograd.grad(total, (hidden, weight)) for total in found]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient_and_the_other_its_own(frozen):
    hidden, weight, labels = drawn()
    (hidden if frozen == "hidden" else weight).requires_grad_(requires_grad=False)
    cross_entropy(hidden, OutputHead(weight), labels)[0].backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_a_tied_matrix_gets_the_gradients_of_both_of_its_uses():
    _, weight, labels = drawn()
    ids = torch.arange(TOKENS)
    (found,) = torch.autograd.grad(cross_entropy(weight[ids], OutputHead(weight), labels)[0], weight)
    (expected,) = torch.autograd.grad(plain(weight[ids], weight, labels).sum(), weight)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_in_bfloat16_it_is_as_near_to_the_exact_gradient_as_the_plain_loss():
    """Within a tenth: products of chunks are rounded one by one, but added in float32."""
    exact_hidden, exact_weight, labels = drawn()
    exact = torch.autograd.grad(plain(exact_hidden, exact_weight, labels).sum(), exact_weight)[0]
    hidden, weight = (t.detach().bfloat16().requires_grad_() for t in (exact_hidden, exact_weight))
    total, each = cross_entropy(hidden, OutputHead(weight), labels, tokens_at_once=4)
    assert total.dtype == each.dtype == torch.float32
    (found,) = torch.autograd.grad(total, weight)
    assert found.dtype == torch.bfloat16
    (theirs,) = torch.autograd.grad(
        functional.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum"), weight
    )
    assert (found.double() - exact).norm() <= 1.1 * (theirs.double() - exact).norm()


def test_a_second_backward_through_kept_buffers_is_refused_not_wrong():
    hidden, weight, labels = drawn()
    total, _ = cross_entropy(hidden, OutputHead(weight), labels)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


class Holder:
    """One of several holders of a vocabulary: its reductions are known, and what it hands to them is kept."""

    def __init__(self, first, known):
        self.first, self.handed, self._known = first, [], iter(known)

    def _reduce(self, x):
        self.handed.append(x.clone())
        return next(self._known, x)

    largest = total = _reduce


def reduced(hidden, halves, labels):
    """Find the reductions of a loss over two halves of a vocabulary, one collective after the other."""
    known = []
    for reduce in (torch.maximum, torch.add, torch.add):
        handed = []
        for first, weight in halves:
            holder = Holder(first, known)
            with torch.no_grad():
                cross_entropy(hidden, OutputHead(weight, 2.0, holder), labels, tokens_at_once=TOKENS)
            handed.append(holder.handed[len(known)])
        known.append(reduce(*handed))
    return known


def test_ranks_that_share_the_vocabulary_find_the_loss_and_the_gradients_of_the_whole():
    hidden, weight, labels = drawn()
    halves = [(0, weight.detach()[:20].requires_grad_()), (20, weight.detach()[20:].requires_grad_())]
    known = reduced(hidden, halves, labels)
    of_hidden, of_weight = torch.zeros_like(hidden), []
    expected = plain(hidden, weight, labels, scaling=2.0).sum()
    for first, part in halves:
        head = OutputHead(part, 2.0, Holder(first, known))
        total, _ = cross_entropy(hidden, head, labels, tokens_at_once=TOKENS)
        torch.testing.assert_close(total, expected, rtol=1e-14, atol=0)
        gradients = torch.autograd.grad(total, (hidden, part))
        of_hidden += gradients[0]
        of_weight.append(gradients[1])
    exact = torch.autograd.grad(expected, (hidden, weight))
    torch.testing.assert_close(of_hidden, exact[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.cat(of_weight), exact[1], rtol=1e-12, atol=1e-13)


def test_the_logits_are_never_whole():
    tokens, vocab = 512, 300
    hidden = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(vocab, 8, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))
    whole = tokens * vocab * 4
    with LiveBytes() as seen:
        cross_entropy(hidden, OutputHead(weight), labels, tokens_at_once=64)[0].backward()
    assert seen.largest < whole // 4
    assert seen.peak < whole // 2
    with LiveBytes() as plainly:
        plain(hidden, weight, labels).sum().backward()
    assert plainly.peak > whole


def test_evaluation_holds_no_gradient():
    hidden, weight, labels = drawn()
    with LiveBytes() as seen, torch.no_grad():
        cross_entropy(hidden, OutputHead(weight), labels, tokens_at_once=1)
    assert seen.largest < weight.nbytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keep", [True, False])
def test_what_is_compiled_for_gpus_is_what_cpus_compute(dtype, keep):
    """1e-6: exponentials are computed twice instead of kept."""
    hidden, weight, labels = drawn(dtype)
    logits = (3 * hidden.detach() @ weight.detach().T).contiguous()
    found = _losses_to_compile(logits.clone(), labels, Whole(), 1.5, ignored=-100, keep=keep)
    expected = _losses(logits.clone(), labels, Whole(), 1.5, ignored=-100, keep=keep)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
    if keep:
        assert found[1].dtype == dtype
        torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-6)
    else:
        assert found[1] is expected[1] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_compiled_scales_gradients_as_torch_does(dtype):
    gradient, factor = torch.randn(7, 33) * 1e-3, torch.tensor(0.37)
    expected = (gradient.double() * factor.double()).float().to(dtype)  # exact in float64, rounded twice
    for scaled in (_product, _product_to_compile):
        assert torch.equal(scaled(gradient, factor, dtype), expected)
