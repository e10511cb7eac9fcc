"""Attention sinks against the softmax with one more key, written out."""

from functools import partial

import pytest
import torch

from penstock.nn.kernels import choose, varlen_torch
from penstock.nn.kernels.layout import AttentionLayout, visibility_mask
from penstock.nn.kernels.sdpa import ByDocument, Causal
from penstock.nn.kernels.varlen_cpu import per_document
from penstock.nn.kernels.varlen_flash import VarLen, var_len

CPU = torch.device("cpu")
HEADS, KV, LENGTH, DIM = 4, 2, 11, 8


def drawn(dtype=torch.float64):
    """Return queries, keys, values and sinks of one row."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, HEADS, LENGTH, DIM), (1, KV, LENGTH, DIM), (1, KV, LENGTH, DIM), (HEADS,)]
    made = [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
    return [tensor.requires_grad_() for tensor in made]


def one_more_key(q, k, v, sinks, mask):
    """Attend to the visible keys, and to one whose score is the sink and whose value is 0."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (0.3 * q @ k.mT).masked_fill(~mask, -torch.inf)
    column = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
    values = torch.cat((v, torch.zeros_like(v[:, :, :1])), 2)
    return torch.cat((scores, column), -1).softmax(-1) @ values


def with_gradients(attend, tensors):
    out = attend(*tensors)
    upstream = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).cos()
    return [out.detach(), *torch.autograd.grad(out, tensors, upstream)]


def layout(**of):
    return AttentionLayout(batch=1, seq_len=LENGTH, **of)


def expected(of, tensors):
    return with_gradients(lambda *t: one_more_key(*t, visibility_mask(of, device=CPU)), tensors)


def test_one_visible_key_has_the_gradients_of_its_two_term_softmax():
    """With q = k = 1, v = 2 and a sink of 0 the weight of the key is sigmoid(1), so dq is 2 sigmoid'(1)."""
    q, k, v, sink = (torch.full((1,), x, dtype=torch.float64, requires_grad=True) for x in (1.0, 1, 2, 0))
    attend = per_document(AttentionLayout(batch=1, seq_len=1))
    attend(*(t.view(1, 1, 1, 1) for t in (q, k, v)), scale=1.0, sinks=sink).sum().backward()
    assert [t.grad.item() for t in (q, k, v, sink)] == pytest.approx(
        [0.3932238664829637, 0.3932238664829637, 0.7310585786300049, -0.3932238664829637], abs=1e-15
    )


def test_a_sink_far_below_the_scores_changes_nothing_and_one_far_above_leaves_nothing():
    q, k, v, _ = drawn()
    attend = per_document(layout())
    without = attend(q, k, v, scale=0.3)
    for sink, kept in ((-1e4, 1.0), (1e4, 0.0)):
        sinks = torch.full((HEADS,), sink, dtype=torch.float64, requires_grad=True)
        found = with_gradients(partial(attend, scale=0.3, sinks=sinks), (q, k, v))
        torch.testing.assert_close(found[0], without * kept, rtol=0, atol=1e-14)
        assert all(tensor.isfinite().all() for tensor in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_types_stray_no_further_with_sinks_than_without(dtype):
    tensors, attend = drawn(dtype), per_document(layout())
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]

    def error(of, count):
        pairs = zip(*(with_gradients(of, some[:count]) for some in (tensors, exact)), strict=True)
        return max(float((ours.double() - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)

    def with_sinks(q, k, v, sinks):
        return attend(q, k, v, scale=0.3, sinks=sinks)

    assert 0 < error(with_sinks, 4) < 2 * error(partial(attend, scale=0.3), 3)


@pytest.mark.parametrize("kernel", [Causal(), ByDocument((), lambda: torch.empty(0))])
def test_a_kernel_without_log_sums_takes_no_sinks(kernel):
    q, k, v, sinks = drawn()
    with pytest.raises(TypeError, match="sinks"):
        kernel(q, k, v, scale=0.3, sinks=sinks)


@pytest.mark.parametrize("operation", [choose.ROWS, choose.DOCUMENTS, choose.WINDOW])
def test_no_measurement_lets_a_layer_with_sinks_take_a_kernel_without(operation):
    of = {
        choose.ROWS: layout(),
        choose.DOCUMENTS: layout(cu_seqlens=torch.tensor([0, 4, LENGTH])),
        choose.WINDOW: layout(window=3),
    }[operation]
    tensors = drawn()
    for name in choose.CANDIDATES[operation]:
        attend = choose.choose_kernel(
            of, device=CPU, dtype=torch.float64, head_dim=DIM, has_sinks=True, kernels={operation: name}
        )
        found = with_gradients(lambda q, k, v, s, attend=attend: attend(q, k, v, scale=0.3, sinks=s), tensors)
        for ours, theirs in zip(found, expected(of, tensors), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def flash(q, k, v, ends, _, __, ___, *, return_aux, scale, window_size, enable_gqa=False):
    """What varlen_attn returns: [t, h, d], and the log-sums [h, t]."""
    assert return_aux.lse
    assert enable_gqa == (q.shape[1] != k.shape[1])
    scores = scores_of(q, k, ends, scale, window_size)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (scores.softmax(-1) @ v.transpose(0, 1)).transpose(0, 1), scores.logsumexp(-1)


def flash_backward(upstream, q, k, v, out, log_sums, ends, _, __, ___, causal, ____, scale, window):
    """The backward pass of FlashAttention-2 (arXiv:2307.08691, algorithm 2): it takes output and log-sums."""
    assert causal == (window == [-1, 0])
    group = q.shape[1] // k.shape[1]
    weights = (scores_of(q, k, ends, scale, window) - log_sums[..., None]).exp()
    d_out, q_h, k_h, v_h = (
        t.repeat_interleave(q.shape[1] // t.shape[1], 1).transpose(0, 1) for t in (upstream, q, k, v)
    )
    row = (upstream * out).sum(-1).transpose(0, 1)[..., None]
    d_scores = weights * (d_out @ v_h.mT - row) * scale
    dq, dk, dv = d_scores @ k_h, d_scores.mT @ q_h, weights.mT @ d_out
    shared = (t.unflatten(0, (-1, group)).sum(1).transpose(0, 1) for t in (dk, dv))
    return dq.transpose(0, 1), *shared


def scores_of(q, k, ends, scale, window):
    left = None if window[0] == -1 else window[0] + 1
    of = AttentionLayout(batch=1, seq_len=len(q), window=left, cu_seqlens=ends)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = scale * q.transpose(0, 1) @ k.transpose(0, 1).mT
    return scores.masked_fill(~visibility_mask(of, device=CPU)[0], -torch.inf)


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_of_variable_lengths_has_the_gradients_of_one_more_key(window, repeats, monkeypatch):
    pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", flash)
    monkeypatch.setattr(varlen_torch, "_kernel_backward", flash_backward)
    ends = torch.tensor([0, 4, 5, LENGTH], dtype=torch.int32)
    attend, tensors = VarLen(ends, LENGTH, window, repeats), drawn()
    found = with_gradients(lambda q, k, v, s: attend(q, k, v, scale=0.3, sinks=s), tensors)
    for ours, theirs in zip(found, expected(layout(window=window, cu_seqlens=ends), tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_release_whose_kernel_returns_no_log_sums_is_not_taken_for_sinks(monkeypatch):
    monkeypatch.setattr("penstock.nn.kernels.varlen_flash.is_available", lambda **_: True)
    of = {"device": CPU, "dtype": torch.bfloat16, "head_dim": DIM}
    for options, is_taken in (({"scale"}, False), ({"scale", "return_aux"}, True)):
        monkeypatch.setattr(varlen_torch, "parameters", lambda options=options: frozenset(options))
        assert (var_len(layout(), **of, has_sinks=True) is not None) == is_taken
        assert var_len(layout(), **of) is not None


@pytest.mark.filterwarnings("ignore")  # the compiler warns of what it does itself
@pytest.mark.parametrize("kernel", ["documents", "varlen"])
def test_a_compiled_block_has_the_gradients_of_one_more_key(kernel, monkeypatch):
    ends = torch.tensor([0, 4, 5, LENGTH], dtype=torch.int32)
    of = layout(window=3, cu_seqlens=ends)
    attend = per_document(of)
    if kernel == "varlen":
        pytest.importorskip("torch.nn.attention.varlen")
        monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", flash)
        monkeypatch.setattr(varlen_torch, "_kernel_backward", flash_backward)
        attend = VarLen(ends, LENGTH, 3)
    compiled = torch.compile(
        lambda q, k, v, s: attend(q, k, v, scale=0.3, sinks=s), backend="aot_eager", fullgraph=True
    )
    tensors = drawn()
    for ours, theirs in zip(with_gradients(compiled, tensors), expected(of, tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
