"""Softcaps against formulas written out in float64: attention, forward and backward, and each loss."""

import pytest
import torch
from torch.nn import functional

from penstock.models.decoder.config import DecoderConfig
from penstock.nn.cross_entropy import cross_entropy
from penstock.nn.head import OutputHead
from penstock.nn.kernels import softcap
from penstock.nn.kernels.choose import choose_kernel
from penstock.nn.kernels.layout import AttentionLayout, visibility_mask
from penstock.nn.kernels.softcap import Capped, with_softcap
from penstock.nn.kernels.written_out import attend_written_out
from penstock.nn.token_log_probs import token_log_probs
from penstock.nn.top_k_divergence import top_k_divergence
from penstock.plan.activations import working_bytes
from penstock.testing.step_memory import LiveBytes
from tests.head_adapters import adapted, drawn_adapter
from tests.unit.nn import test_cross_entropy as losses
from tests.unit.nn import test_top_k_divergence as divergence
from tests.unit.nn.test_kernels import BATCH, CASES, CPU, DIM, ENDS, SEQ, tensors

CAP, SCALE = 0.7, 0.9


def choose(layout):
    return choose_kernel(layout, device=CPU, dtype=torch.float64, head_dim=DIM, has_softcap=True)


def formula(q, k, v, mask):
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = CAP * torch.tanh(torch.einsum("bhld,bhsd->bhls", q, k) * SCALE / CAP)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def agree(found, expected, given, *, tolerance=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    upstream = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    pairs = [torch.autograd.grad(out, given, upstream) for out in (found, expected)]
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("rows", [2, 128])
@pytest.mark.parametrize("case", CASES)
def test_capped_attention_and_its_gradients_are_those_of_the_formula(case, rows, monkeypatch):
    monkeypatch.setattr(softcap, "QUERIES", rows)
    layout, q, k, v = CASES[case][0], *tensors()
    attend = choose(layout)
    assert isinstance(attend, Capped)
    mask = visibility_mask(layout, device=CPU)
    found = attend(q, k, v, scale=SCALE, softcap=CAP)
    agree(found, formula(q, k, v, mask), (q, k, v))
    assert (found - attend(q, k, v, scale=SCALE, softcap=1e9)).abs().max() > 0.1  # it does something
    of_each = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    written = attend_written_out(q, *of_each, mask, scale=SCALE, softcap=CAP)
    torch.testing.assert_close(found, written, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [2, 128])
@pytest.mark.parametrize("case", CASES)
def test_the_queries_of_a_slice_of_each_row_are_those_of_the_whole_row(case, rows, monkeypatch):
    monkeypatch.setattr(softcap, "QUERIES", rows)
    layout, q, k, v = CASES[case][0], *tensors()
    mask = visibility_mask(layout, device=CPU)
    for first, past in ((0, 4), (4, 8), (8, SEQ), (3, 4)):
        attend = with_softcap(layout, first=first, past=past)
        found = attend(q[:, :, first:past], k[:, :, :past], v[:, :, :past], scale=SCALE, softcap=CAP)
        agree(found, formula(q, k, v, mask)[:, :, first:past], (q, k, v))


def test_a_compiled_block_caps_and_is_not_compiled_anew_for_other_documents():
    compiled = torch.compile(
        lambda attend, *t: attend(*t, scale=SCALE, softcap=CAP),
        backend="aot_eager",
        fullgraph=True,
        dynamic=False,
    )
    q, k, v = (t.detach() for t in tensors())
    for stance, ends in (("default", ENDS), ("fail_on_recompile", torch.tensor([0, 12, 13, 24]))):
        layout = AttentionLayout(batch=BATCH, seq_len=SEQ, cu_seqlens=ends.int())
        attend = choose(layout)
        with torch.compiler.set_stance(stance):
            found = compiled(attend, q, k, v)
        torch.testing.assert_close(found, attend(q, k, v, scale=SCALE, softcap=CAP), rtol=0, atol=1e-12)


def test_a_document_in_a_row_is_bit_for_bit_that_document_alone():
    q, k, v = (t.detach().float() for t in tensors())
    packed = choose(AttentionLayout(batch=BATCH, seq_len=SEQ, cu_seqlens=ENDS))
    alone = choose(AttentionLayout(batch=1, seq_len=8))
    found = packed(q, k, v, scale=SCALE, softcap=CAP)[:1, :, 4:]
    piece = [t[:1, :, 4:] for t in (q, k, v)]
    assert torch.equal(found, alone(*piece, scale=SCALE, softcap=CAP))


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_linear_in_the_length_of_a_row_and_counted_by_the_planner(dtype, context):
    """Of whole rows, and of the last slice of gathered ones."""
    length, sizes = 2048, {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    model = DecoderConfig(
        model_type="gemma2", vocab_size=9, hidden_size=64, intermediate_size=8, num_hidden_layers=1,
        attn_logit_softcapping=CAP, **sizes,
    )  # fmt: skip
    mine = length // context
    q, k, v, upstream = (
        torch.randn(tokens, heads, 64).to(dtype)
        for tokens, heads in ((mine, 8), (length, 4), (length, 4), (mine, 8))
    )
    ends = choose(AttentionLayout(batch=1, seq_len=length)).ends
    rest = ends, length, length - mine, length, 0, SCALE, CAP
    with LiveBytes() as forward:  # of the function, as the operator shows nothing of what it does inside
        out, sums = softcap._attend(q, k, v, *rest)
    with LiveBytes() as backward:
        softcap._attend_backward(upstream, q, k, v, out, sums, *rest)
    assert forward.peak < backward.peak < 4 * 8 * length * length  # all scores, once
    planned = working_bytes(
        model, model.layers[0], tokens=mine, compute_bytes=dtype.itemsize, context=context, row=length
    )
    assert 0.95 * backward.peak < planned < 1.2 * backward.peak


def test_attention_without_a_softcap_does_not_take_one():
    attend = choose_kernel(AttentionLayout(batch=1, seq_len=3), device=CPU, dtype=torch.float32, head_dim=4)
    with pytest.raises(TypeError, match="softcap"):
        attend(*(torch.randn(1, 2, 3, 4) for _ in range(3)), scale=1.0, softcap=CAP)


def capped(logits, cap=2.0):
    return torch.tanh(logits / cap) * cap


@pytest.mark.parametrize("tokens_at_once", [7, None])
@pytest.mark.parametrize("loss", ["cross entropy", "log-probabilities", "divergence"])
def test_each_loss_of_capped_logits_has_the_gradients_of_the_formula(loss, tokens_at_once):
    hidden, weight, labels = losses.drawn()
    head, at_once = OutputHead(weight, 1.5, softcap=2.0), {"tokens_at_once": tokens_at_once}
    logits = capped(hidden @ weight.T / 1.5)
    if loss == "divergence":
        *_, ids, log_probs = divergence.drawn(5, temperature=2.5)
        found, _ = top_k_divergence(hidden, head, ids, log_probs, temperature=2.5, **at_once)
        expected = divergence.plain(
            logits, torch.eye(len(weight), dtype=torch.float64), ids, log_probs, temperature=2.5
        ).sum()
    elif loss == "cross entropy":
        found, _ = cross_entropy(hidden, head, labels, **at_once)
        expected = functional.cross_entropy(logits, labels, reduction="sum")
    else:
        found = token_log_probs(hidden, head, labels, **at_once)
        expected = -functional.cross_entropy(logits, labels, reduction="none")
    agree(found, expected, (hidden, weight))


@pytest.mark.parametrize("loss", [cross_entropy, token_log_probs])
def test_an_adapter_of_a_capped_output_matrix_gets_the_gradients_of_the_formula(loss):
    hidden, weight, labels = losses.drawn()
    adapter = drawn_adapter(has_magnitudes=True)
    found = loss(hidden, OutputHead(weight, 8.0, adapter=adapter, softcap=2.0), labels, tokens_at_once=7)
    expected = functional.cross_entropy(capped(adapted(hidden, weight, adapter) / 8), labels, reduction="sum")
    total = found[0] if isinstance(found, tuple) else -found.sum()
    agree(total, expected, (hidden, adapter.a, adapter.b, adapter.magnitude), tolerance=1e-5)


def test_the_operator_keeps_the_rules_of_pytorch_operators():
    q, k, v = (t.detach()[0].transpose(0, 1).float().requires_grad_() for t in tensors())
    ends = torch.tensor([0, 5, 12] + 10 * [12], dtype=torch.int32)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = torch.ops.penstock.attend_capped.default
    torch.library.opcheck(operator, (q, k, v, ends, 12, 0, 12, 4, SCALE, CAP), test_utils=checks)
