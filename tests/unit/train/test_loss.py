"""The loss against cross entropy written out in float64."""

import pytest
import torch

from penstock.data.types import IGNORED_LABEL
from penstock.nn.head import OutputHead
from penstock.train.loss import next_token_loss


def drawn(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states [3, 5, 8], an output matrix [11, 8] and labels [3, 5], a third of them ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, 8, generator=generator).to(dtype)
    weight = torch.randn(11, 8, generator=generator).to(dtype)
    labels = torch.randint(0, 11, (3, 5), generator=generator)
    labels.view(-1)[::3] = IGNORED_LABEL
    return hidden, weight, labels


def written_out(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Sum of -log softmax at the labels, in float64."""
    total = 0.0
    for row, label in zip(logits.double().flatten(0, 1), labels.flatten().tolist(), strict=True):
        if label != IGNORED_LABEL:
            total -= (row - row.max()).softmax(0)[label].log().item()
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_the_sum_over_labels_in_float32_whatever_the_logits_are(dtype: torch.dtype) -> None:
    """1e-5 relative: float32 sums of ten terms against float64 on the same logits."""
    hidden, weight, labels = drawn(dtype)
    loss = next_token_loss(labels)(hidden, OutputHead(weight))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(written_out(hidden @ weight.T, labels), rel=1e-5)


def test_ignored_labels_give_no_gradient() -> None:
    hidden, weight, labels = drawn()
    hidden.requires_grad_()
    next_token_loss(labels)(hidden, OutputHead(weight)).backward()
    assert hidden.grad is not None
    ignored = labels == IGNORED_LABEL
    assert (hidden.grad[ignored] == 0).all()
    assert (hidden.grad[~ignored] != 0).any(-1).all()


def test_without_any_label_the_loss_is_zero_and_not_nan() -> None:
    hidden, weight, labels = drawn()
    labels[:] = IGNORED_LABEL
    assert next_token_loss(labels)(hidden, OutputHead(weight)).item() == 0.0


def test_large_logits_do_not_overflow() -> None:
    labels = torch.tensor([[0, 1]])
    loss = next_token_loss(labels)(torch.tensor([[[1e4, 0.0], [1e4, 0.0]]]), OutputHead(torch.eye(2)))
    assert loss.item() == pytest.approx(1e4)
