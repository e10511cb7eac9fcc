"""Every attention kernel against a softmax written out, forward and backward."""

import warnings

import pytest
import torch
from torch.nn.attention import SDPBackend

from penstock.nn.kernels import flex, sdpa
from penstock.nn.kernels import layout as pieces
from penstock.nn.kernels.choose import choose_kernel
from penstock.nn.kernels.layout import AttentionLayout, starts_of, visibility_mask
from penstock.nn.kernels.sdpa import Causal, Masked
from penstock.nn.kernels.varlen_cpu import PerDocument, per_document

CPU = torch.device("cpu")
BATCH, SEQ, HEADS, KV, DIM = 2, 12, 4, 2, 8
ENDS = torch.tensor([0, 3, 4, 12, 17, 24], dtype=torch.int32)


def choose(layout):
    return choose_kernel(layout, device=CPU, dtype=torch.float64, head_dim=DIM)


def tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, HEADS, SEQ, DIM), (BATCH, KV, SEQ, DIM), (BATCH, KV, SEQ, DIM)]
    made = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    return [t.requires_grad_() for t in made]


def written_out(q, k, v, *, scale, sees):
    """Attend one query at a time; `sees(batch, query, key)` says what is visible."""
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for i in range(q.shape[2]):
            keys = [j for j in range(k.shape[2]) if sees(b, i, j)]
            for h in range(q.shape[1]):
                group = h * k.shape[1] // q.shape[1]
                weights = torch.softmax(scale * (k[b, group, keys] @ q[b, h, i]), dim=0)
                out[b, h, i] = weights @ v[b, group, keys]
    return out


def document_of(b, i):
    return int(torch.searchsorted(ENDS, torch.tensor(b * SEQ + i, dtype=torch.int32), right=True))


CASES = {
    "causal": (AttentionLayout(batch=BATCH, seq_len=SEQ), Causal, lambda _, i, j: j <= i),
    "window": (
        AttentionLayout(batch=BATCH, seq_len=SEQ, window=3),
        PerDocument,
        lambda _, i, j: i - 3 < j <= i,
    ),
    "wide window": (AttentionLayout(batch=BATCH, seq_len=SEQ, window=12), Causal, lambda _, i, j: j <= i),
    "documents": (
        AttentionLayout(batch=BATCH, seq_len=SEQ, cu_seqlens=ENDS),
        PerDocument,
        lambda b, i, j: j <= i and document_of(b, i) == document_of(b, j),
    ),
    "documents and window": (
        AttentionLayout(batch=BATCH, seq_len=SEQ, cu_seqlens=ENDS, window=4),
        PerDocument,
        lambda b, i, j: i - 4 < j <= i and document_of(b, i) == document_of(b, j),
    ),
}


def is_attention_written_out(attend, sees):
    """Hold results and gradients against the plain formula."""
    q, k, v = tensors()
    found, expected = attend(q, k, v, scale=0.3), written_out(q, k, v, scale=0.3, sees=sees)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, (q, k, v), upstream),
        torch.autograd.grad(expected, (q, k, v), upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_the_chosen_kernel_equals_attention_written_out(case):
    layout, kind, sees = CASES[case]
    attend = choose(layout)
    assert isinstance(attend, kind)
    is_attention_written_out(attend, sees)


def pieces_of(layout, monkeypatch):
    """What a GPU without the variable-length kernel takes, which any device can."""
    monkeypatch.setattr(sdpa, "_WORTH_A_CALL", 1)
    monkeypatch.setattr(pieces, "_RUN", 2)

    like = torch.empty(0, dtype=torch.float64)
    return sdpa.by_document(layout, like=like, mask=lambda: visibility_mask(layout, device=CPU))


@pytest.mark.parametrize("case", ["causal", "window", "documents", "documents and window"])
def test_pieces_by_any_kernel_equal_attention_written_out(case, monkeypatch):
    layout, _, sees = CASES[case]
    is_attention_written_out(pieces_of(layout, monkeypatch), sees)


def test_in_a_compiled_block_pieces_are_a_mask_and_change_without_compiling_anew(monkeypatch):
    compiled = torch.compile(
        lambda attend, *t: attend(*t, scale=0.3), backend="aot_eager", fullgraph=True, dynamic=False
    )
    stances = ("default", "fail_on_recompile")
    for stance, other in zip(stances, ([0, 3, 4, 12, 17, 24], [0, 12, 13, 14, 15, 24]), strict=True):
        ends = torch.tensor(other, dtype=torch.int32)
        attend = pieces_of(AttentionLayout(batch=BATCH, seq_len=SEQ, cu_seqlens=ends), monkeypatch)
        q, k, v = (t.detach() for t in tensors())
        with torch.compiler.set_stance(stance):
            found = compiled(attend, q, k, v)
        torch.testing.assert_close(found, attend(q, k, v, scale=0.3), rtol=0, atol=1e-12)


def in_a_block(backend):
    """Compile a function of a kernel and its arguments, as blocks of training are."""
    return torch.compile(
        lambda attend, *t: attend(*t, scale=0.3), backend=backend, fullgraph=True, dynamic=False
    )


def test_a_library_is_named_inside_a_compiled_block():
    compiled = in_a_block("aot_eager")
    q, k, v = (t.detach() for t in tensors())
    for backend in (None, SDPBackend.MATH):
        found = compiled(Causal(backend), q, k, v)
        torch.testing.assert_close(found, Causal()(q, k, v, scale=0.3), rtol=0, atol=1e-12)


def test_a_library_that_a_device_lacks_raises_and_another_is_not_taken():
    q, k, v = (t.detach() for t in tensors())
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(RuntimeError, match=r"No (available kernel|viable backend)"),
    ):
        Causal(SDPBackend.CUDNN_ATTENTION)(q, k, v, scale=0.3)


def test_flex_attention_in_a_compiled_block_shows_what_the_mask_shows_and_is_compiled_once(monkeypatch):
    monkeypatch.setattr(flex, "has_triton", lambda _: True)
    compiled, (q, k, v) = in_a_block("eager"), (t.detach().float() for t in tensors())
    stances = ("default", "fail_on_recompile", "fail_on_recompile")
    for stance, ends in zip(
        stances, ([0, 3, 4, 12, 17, 24], [0, 12, 13, 14, 15, 24], [0, 12, 24]), strict=True
    ):
        layout = AttentionLayout(
            batch=BATCH, seq_len=SEQ, cu_seqlens=torch.tensor(ends, dtype=torch.int32), window=5
        )
        with torch.compiler.set_stance(stance):
            found = compiled(flex.flex(layout, device=CPU), q, k, v)
        expected = Masked(visibility_mask(layout, device=CPU))(q, k, v, scale=0.3)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_documents_too_short_for_a_call_each_take_the_mask(monkeypatch):
    layout = AttentionLayout(batch=BATCH, seq_len=SEQ, cu_seqlens=ENDS)
    like = torch.empty(0)
    assert sdpa.by_document(layout, like=like, mask=lambda: None) is None, "five of 24 tokens"
    monkeypatch.setattr(sdpa, "_WORTH_A_CALL", 4)
    assert len(sdpa.by_document(layout, like=like, mask=lambda: None).pieces) == 5


@pytest.mark.parametrize("case", CASES)
def test_the_dense_mask_shows_exactly_what_is_visible(case):
    layout, _, sees = CASES[case]
    mask = visibility_mask(layout, device=CPU).expand(BATCH, 1, -1, -1)
    for b, _, i, j in torch.cartesian_prod(*(torch.arange(n) for n in mask.shape)).tolist():
        assert mask[b, 0, i, j] == sees(b, i, j), (b, i, j)


@pytest.mark.parametrize("case", CASES)
def test_the_last_resort_equals_attention_written_out(case):
    layout, _, sees = CASES[case]
    q, k, v = tensors()
    found = Masked(visibility_mask(layout, device=CPU))(q, k, v, scale=0.3)
    torch.testing.assert_close(found, written_out(q, k, v, scale=0.3, sees=sees), rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 4])
def test_a_document_does_not_depend_on_what_it_is_packed_with(window):
    q, k, v = tensors()
    packed = choose(AttentionLayout(batch=BATCH, seq_len=SEQ, cu_seqlens=ENDS, window=window))(
        q, k, v, scale=0.3
    )
    alone = choose(
        AttentionLayout(batch=1, seq_len=8, cu_seqlens=torch.tensor([0, 8], dtype=torch.int32), window=window)
    )
    piece = alone(q[:1, :, 4:], k[:1, :, 4:], v[:1, :, 4:], scale=0.3)
    assert torch.equal(packed[:1, :, 4:], piece)


def test_empty_documents_are_skipped():
    ends = torch.tensor([0, 0, 12, 12, 24, 24], dtype=torch.int32)
    q, k, v = tensors()
    found = per_document(AttentionLayout(batch=BATCH, seq_len=SEQ, cu_seqlens=ends))(q, k, v, scale=1.0)
    assert torch.allclose(found, Causal()(q, k, v, scale=1.0))


@pytest.mark.parametrize("window", [1, 2, 3, 5, 9, 11])
def test_a_window_in_runs_of_any_length_shows_what_the_dense_mask_shows(window, monkeypatch):
    layout = AttentionLayout(batch=BATCH, seq_len=SEQ, cu_seqlens=ENDS, window=window)
    expected = visibility_mask(layout, device=CPU)
    for run in (1, 2, 3, 7):
        monkeypatch.setattr(pieces, "_RUN", run)
        seen = torch.zeros(BATCH * SEQ, BATCH * SEQ, dtype=torch.bool)
        for piece in pieces.pieces(ENDS, window, like=torch.empty(0)):
            part = seen[piece.queries, piece.keys]
            part[:] = torch.ones_like(part).tril() if piece.mask is None else piece.mask == 0
        for row in range(BATCH):
            own = slice(row * SEQ, row * SEQ + SEQ)
            assert seen[own, own].equal(expected[row, 0])
            seen[own, own] = False
        assert not seen.any()


def test_gradients_add_up_over_the_pieces_that_share_keys(monkeypatch):
    monkeypatch.setattr(pieces, "_RUN", 2)
    test_the_chosen_kernel_equals_attention_written_out("documents and window")


def test_tensors_that_lie_in_memory_in_any_order_are_read_right():
    attend = choose(AttentionLayout(batch=BATCH, seq_len=SEQ, cu_seqlens=ENDS, window=4))
    found = []
    for turned in (False, True):
        q, k, v = tensors()
        args = [t.transpose(2, 3).contiguous().transpose(2, 3) if turned else t for t in (q, k, v)]
        out = attend(*args, scale=0.3).sum()  # the gradient of a sum is one number, expanded
        found.append([out, *torch.autograd.grad(out, (q, k, v))])
    for plain, turned in zip(*found, strict=True):
        torch.testing.assert_close(plain, turned, rtol=0, atol=1e-12)
    written = written_out(q, k, v, scale=0.3, sees=CASES["documents and window"][2]).sum()
    torch.testing.assert_close(out, written, rtol=0, atol=1e-12)
    for ours, theirs in zip(found[0][1:], torch.autograd.grad(written, (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_the_operator_keeps_the_rules_of_pytorch_operators():
    q, k, v = (t.detach()[0].transpose(0, 1).float().requires_grad_() for t in tensors())
    ends = torch.tensor([0, 5, 12] + 10 * [12], dtype=torch.int32)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = torch.ops.penstock.attend_documents.default
    for sinks in (None, torch.randn(HEADS).requires_grad_()):
        torch.library.opcheck(operator, (q, k, v, sinks, ends, 4, 0.3), test_utils=checks)


def test_document_ends_that_do_not_cover_the_batch_are_refused():
    ends = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="ends at 5, not at 2 x 12"):
        choose(AttentionLayout(batch=BATCH, seq_len=SEQ, cu_seqlens=ends))


def test_starts_of_gives_the_first_token_of_each_document():
    assert starts_of(ENDS, 24).tolist() == [0] * 3 + [3] + [4] * 8 + [12] * 5 + [17] * 7
