"""Attention in training, forward and backward, against a softmax with a mask in float64."""

import pytest
import torch

from penstock.nn.attention import given_softcap
from penstock.nn.kernels.choose import choose_kernel
from penstock.nn.kernels.layout import AttentionLayout, visibility_mask
from penstock.nn.kernels.sdpa import Masked, by_document
from penstock.nn.kernels.varlen_flash import VarLen
from penstock.nn.kernels.varlen_torch import parameters

# query heads, heads of keys and values, head dim
HEADS = [(5, 5, 64), (9, 3, 96), (7, 1, 128)]
NEAR = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of the largest value: roundings of weights, sums and results to 8 and 11 bits."""


def ends_of(kind, seq_len, batch):
    """Documents' ends: no multiple of a block, one of a single token, one that fills a row."""
    if kind != "documents":
        return None
    whole = batch * seq_len
    rows = range(0, whole + 1, seq_len)
    cuts = sorted({*rows, 1, seq_len // 3 + 1, whole - seq_len // 7 - 1})
    return torch.tensor(cuts, dtype=torch.int32)


def exact(q, k, v, sinks=None, *, layout, scale, softcap=None):
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = visibility_mask(layout, device=q.device)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v.repeat_interleave(groups, 1)


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("window", [None, 37], ids=["all", "window of 37"])
@pytest.mark.parametrize("kind", ["rows", "documents"])
def test_the_chosen_kernel_and_its_gradients_are_those_of_float64(kind, window, dtype, device, is_tiny):
    for heads in HEADS:
        check(choose_kernel, heads, kind, window, dtype, device, is_tiny)


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("window", [None, 37], ids=["all", "window of 37"])
@pytest.mark.parametrize("kind", ["rows", "documents"])
def test_sinks_and_their_gradients_are_those_of_float64(kind, window, dtype, device, is_tiny):
    for heads in HEADS:
        check(choose_kernel, heads, kind, window, dtype, device, is_tiny, has_sinks=True)


@pytest.mark.parametrize("window", [None, 37], ids=["all", "window of 37"])
@pytest.mark.parametrize("kind", ["rows", "documents"])
def test_capped_scores_and_their_gradients_are_those_of_float64(kind, window, device, is_tiny):
    check(choose_kernel, (9, 3, 96), kind, window, torch.bfloat16, device, is_tiny, softcap=0.7)


@pytest.mark.parametrize("kind", ["rows", "documents"])
def test_a_dense_mask_gives_the_same(kind, device, is_tiny):
    def masked(layout, *, device, **_):
        return Masked(visibility_mask(layout, device=device))

    check(masked, (9, 3, 96), kind, 37, torch.bfloat16, device, is_tiny)


@pytest.mark.parametrize("window", [None, 37], ids=["all", "window of 37"])
def test_documents_in_pieces_give_the_same(window, device, is_tiny):
    """What a GPU takes whose torch has no kernel for rows of several documents."""

    def in_pieces(layout, *, device, dtype, **_):
        like = torch.empty(0, dtype=dtype, device=device)
        chosen = by_document(layout, like=like, mask=lambda: visibility_mask(layout, device=device))
        return chosen or Masked(visibility_mask(layout, device=device))

    check(in_pieces, (9, 3, 96), "documents", window, torch.bfloat16, device, is_tiny)


def test_the_kernel_for_rows_of_several_documents_is_torch_s_own(device):
    if device.type != "cuda":
        pytest.skip("the kernel is for NVIDIA GPUs")
    layout = AttentionLayout(
        batch=1, seq_len=9, cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    )
    chosen = choose_kernel(layout, device=device, dtype=torch.bfloat16, head_dim=64)
    missing = {"scale", "window_size"} - parameters()
    if missing:
        pytest.skip(f"varlen_attn of torch {torch.__version__} lacks {', '.join(sorted(missing))}")
    assert isinstance(chosen, VarLen)


def check(make, heads, kind, window, dtype, device, is_tiny, *, has_sinks=False, softcap=None):
    """Hold a kernel and its gradients against float64.

    Args:
        make: (layout, device, dtype, head_dim, has_sinks, has_softcap) -> the kernel.
    """
    batch, seq_len = (2, 61) if is_tiny else (3, 1003)
    num_heads, num_kv, dim = heads
    ends = ends_of(kind, seq_len, batch)
    ends = None if ends is None else ends.to(device)
    layout = AttentionLayout(batch=batch, seq_len=seq_len, cu_seqlens=ends, window=window)
    inputs = [
        torch.randn(batch, n, seq_len, dim, device=device).to(dtype).requires_grad_()
        for n in (num_heads, num_kv, num_kv)
    ]
    if has_sinks:
        inputs.append(torch.linspace(-1, 1.5, num_heads, device=device).to(dtype).requires_grad_())
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    switches = {"has_sinks": has_sinks, "has_softcap": softcap is not None}
    attend = make(layout, device=device, dtype=dtype, head_dim=dim, **switches)
    given = dict(zip(("sinks",), inputs[3:], strict=False)) | given_softcap(softcap)
    found = attend(*inputs[:3], scale=dim**-0.5, **given)
    expected = exact(*doubles, layout=layout, scale=dim**-0.5, softcap=softcap)
    upstream = torch.randn(expected.shape, device=device).to(dtype)
    gradients = torch.autograd.grad(found, inputs, upstream)
    exact_gradients = torch.autograd.grad(expected, doubles, upstream.double())
    for what, ours, theirs in zip(
        ("result", "query", "key", "value", "sinks")[: 1 + len(inputs)],
        (found, *gradients),
        (expected, *exact_gradients),
        strict=True,
    ):
        error = (ours.double() - theirs).abs().max() / theirs.abs().max()
        assert error < NEAR[dtype], f"{num_heads} heads of {num_kv}, {what}: {error:.2g} of the largest"
