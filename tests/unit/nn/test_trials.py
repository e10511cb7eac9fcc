"""Each candidate of each operation is tested against float64; here those that a CPU has."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from penstock.devices.kernel_choice import failure, measure
from penstock.nn import native
from penstock.nn.kernels import choose, paged, paged_varlen, trials
from penstock.nn.kernels.layout import AttentionLayout
from penstock.nn.kernels.pages import from_pages, read
from penstock.nn.kernels.sdpa import Causal
from penstock.nn.kernels.trials import Heads, attention_operations, page_operations
from penstock.nn.linear.trials import product_operations
from tests.paged_cases import a_few_sinks, a_layer, a_step, written_out

CPU = torch.device("cpu")


OF_CPU = {
    **({"C++ operator": paged.by_operator} if native.is_available() else {}),
    "SDPA, gathered": paged.plain_attention,
}
"""Kernels over pages on CPUs, of which an engine has no choice."""


def heads(dtype=torch.float32, *, has_sinks=False):
    return Heads(heads=4, kv_heads=2, head_dim=16, dtype=dtype, device=CPU, has_sinks=has_sinks)


def operations(dtype=torch.float32, pages=None, *, has_sinks=False):
    sizes = heads(dtype, has_sinks=has_sinks)
    return [
        *attention_operations(sizes, rows=1, length=400, windows={None, 20}),
        *(
            replace(
                one, kernels={name: partial(trials._over_pages, attend) for name, attend in OF_CPU.items()}
            )
            for one in page_operations(
                sizes,
                pages=pages or dtype,
                block_size=16,
                sequences=2,
                prompt=40,
                context=70,
                window=50,
            )
        ),
    ]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_candidate_of_a_cpu_is_right(dtype, has_sinks):
    tried = 0
    for operation in operations(dtype, has_sinks=has_sinks):
        for kernel in operation.kernels:
            if dtype == torch.float64 and kernel == "C++ operator":
                continue  # of float32 and bfloat16
            assert failure(operation, kernel) == "", (operation.name, kernel)
            tried += 1
    assert tried >= (8 if has_sinks else 12)


def test_a_kernel_that_forgets_sinks_is_found_wrong():
    for operation in operations(has_sinks=True):
        prepare = next(iter(operation.kernels.values()))
        forgetful = {"forgetful": lambda case, prepare=prepare: prepare(_without_sinks(case))}
        assert failure(replace(operation, kernels=forgetful), "forgetful"), operation.name


def _without_sinks(case):
    if len(case) == 3:  # of training
        layout, given, upstream = case
        return layout, given[:3], upstream
    return *case[:-1], None


def test_pages_of_8_bits_have_candidates_that_are_right():
    for operation in operations(torch.bfloat16, pages=torch.int8)[-2:]:
        assert [failure(operation, kernel) for kernel in operation.kernels] == [""] * len(OF_CPU)


def test_the_order_of_candidates_is_the_choice_without_measurement():
    first = {
        one.name: one.first for one in attention_operations(heads(), rows=1, length=400, windows={None, 20})
    }
    assert first == {choose.ROWS: "SDPA", choose.DOCUMENTS: "documents", choose.WINDOW: "documents"}


@pytest.mark.parametrize("name", [choose.ROWS, choose.DOCUMENTS, choose.WINDOW])
def test_a_kernel_that_sees_too_much_is_found_wrong(name):
    """The test tells kernels apart: one that ignores documents and windows is right for whole rows alone."""
    operation = next(one for one in operations() if one.name == name)
    whole = replace(operation, kernels={"whole rows": _as_whole_rows})
    assert failure(whole, "whole rows").startswith("wrong by") == (name != choose.ROWS)


def _as_whole_rows(case):
    _, (q, k, v), upstream = case

    def call():
        out = Causal()(q, k, v, scale=q.shape[-1] ** -0.5)
        return out, *torch.autograd.grad(out, (q, k, v), upstream)

    return call


def test_attention_of_a_cpu_is_measured_by_the_same_code():
    for operation in attention_operations(heads(), rows=1, length=400):
        row = measure(operation, CPU)
        assert row.us.keys() == operation.kernels.keys()
        assert row.kernel in row.us
        assert row.out == {}


def test_documents_too_short_for_a_call_each_leave_that_candidate_out():
    (_, documents) = attention_operations(heads(), rows=1, length=100)
    assert "no such kernel for these documents" in measure(documents, CPU).out["SDPA by document"]


def test_a_model_whose_layers_all_have_a_window_has_no_other_operation():
    assert [one.name for one in attention_operations(heads(), rows=1, length=64, windows={16})] == [
        choose.WINDOW
    ]
    assert [one.name for one in attention_operations(heads(), rows=1, length=64, windows={64})] == [
        choose.ROWS,
        choose.DOCUMENTS,
    ]


def test_keys_name_all_that_a_time_depends_on():
    keys = {one.key for one in operations()} | {one.key for one in operations(torch.bfloat16)}
    assert len(keys | {one.key for one in operations(has_sinks=True)}) == len(keys) + 5 == 15
    assert "attention.rows 1 x 400, 4 heads of 2, 16 wide, float32" in keys


def test_products_have_one_kernel_on_cpus():
    assert product_operations("int8", outputs=64, inputs=64, dtype=torch.float32, device=CPU) == []


def chosen(name, layout=None):
    layout = layout or AttentionLayout(batch=1, seq_len=8, cu_seqlens=torch.tensor([0, 3, 8]))
    return choose.choose_kernel(
        layout, device=CPU, dtype=torch.float32, head_dim=16, kernels={choose.operation_of(layout): name}
    )


def test_a_chosen_kernel_is_used_and_one_that_is_missing_is_the_first():
    assert type(chosen("SDPA with a mask")).__name__ == "Masked"
    assert type(chosen("documents")).__name__ == "PerDocument"
    for missing in ("varlen", "FlexAttention", "of another version"):
        assert type(chosen(missing)).__name__ == "PerDocument"


SHARES = [(1, 40), (1, 3), (130, 150), (200, 200)]


@pytest.fixture
def on_a_gpu_of_plain_torch(monkeypatch):
    """Have the CPU taken for a GPU whose kernels are those of plain torch; count the calls of each."""
    calls = []

    def kernel(name):
        def attend(*args, **how):
            calls.append((name, len(args[0])))
            return paged.plain_attention(*args, **how)

        return attend

    def varlen(q, k, v, q_ends, k_ends, *, longest, window, scale, sinks=None):
        out, group = torch.empty_like(q), q.shape[1] // k.shape[1]
        for (first, past), (since, until) in zip(_pairs(q_ends), _pairs(k_ends), strict=True):
            assert past - first <= longest[0]
            assert until - since <= longest[1]
            own = torch.arange(until - since)[None]
            position = own[:, until - since - (past - first) :].T
            seen = (own <= position) & (own > position - (window or len(own[0])))
            k_here, v_here = (t[since:until].repeat_interleave(group, 1) for t in (k, v))
            scores = torch.einsum("qhd,shd->hqs", q[first:past], k_here) * scale
            scores = scores.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
            weights = scores.softmax(-1)[..., : until - since]
            out[first:past] = torch.einsum("hqs,shd->qhd", weights, v_here)
        calls.append(("varlen", len(q)))
        return out

    monkeypatch.setattr(paged, "_has_kernels", lambda *_: True)
    monkeypatch.setattr(paged_varlen, "attend_varlen", varlen)
    monkeypatch.setitem(paged.CANDIDATES[paged.DECODE], paged.TRITON, kernel("decode"))
    monkeypatch.setitem(paged.CANDIDATES[paged.PROMPTS], paged.TRITON, kernel("prompts"))
    return calls


def _pairs(ends):
    return list(zip(ends.tolist(), ends.tolist()[1:], strict=False))


def attended(shares, kernels, *, window=None, pages=None, sinks=None):
    """Attend as the engine does; return the result and what is exact."""
    step, num_blocks = a_step(shares, block_size=16)
    sizes = {"heads": 4, "kv_heads": 2, "block_size": 16, "head_dim": 8}
    layer, q, *_ = a_layer(step, num_blocks, **sizes, pages=pages)
    attend = paged.Paged(replace(step, kernels=kernels), window)
    found = attend(q, layer.keys, layer.values, scale=0.3, sinks=sinks)
    return found.double(), written_out(q, layer, shares, scale=0.3, window=window, sinks=sinks)


@pytest.mark.parametrize("pages", [None, torch.int8], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("window", [None, 45])
@pytest.mark.parametrize("prompts", ["varlen, gathered", "SDPA and varlen, gathered", paged.TRITON])
def test_prompts_and_single_tokens_each_have_a_kernel(
    prompts, window, pages, monkeypatch, on_a_gpu_of_plain_torch
):
    monkeypatch.setattr(paged_varlen, "WORTH_ALONE", 165)  # what these have on average
    found, exact = attended(SHARES, {paged.PROMPTS: prompts}, window=window, pages=pages)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    calls = on_a_gpu_of_plain_torch
    assert calls[0] == ("decode", 2)
    if prompts == "varlen, gathered":
        assert calls[1:] == [("varlen", 330)]
    if prompts == "SDPA and varlen, gathered":  # a whole prompt without a window needs no variable lengths
        assert calls[1:] == [("varlen", 130), *([("varlen", 200)] if window else [])]


@pytest.mark.parametrize("window", [None, 45])
@pytest.mark.parametrize("prompts", ["varlen, gathered", "SDPA and varlen, gathered", paged.TRITON])
def test_each_kernel_of_prompts_takes_sinks_and_sdpa_computes_none(
    prompts, window, monkeypatch, on_a_gpu_of_plain_torch
):
    monkeypatch.setattr(paged_varlen, "WORTH_ALONE", 165)
    found, exact = attended(SHARES, {paged.PROMPTS: prompts}, window=window, sinks=a_few_sinks(4))
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    if prompts == "SDPA and varlen, gathered":
        assert on_a_gpu_of_plain_torch[1:] == [("varlen", 130), ("varlen", 200)]


def test_short_prompts_are_one_call(on_a_gpu_of_plain_torch):
    found, exact = attended(SHARES, {paged.PROMPTS: "SDPA and varlen, gathered"})
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    assert on_a_gpu_of_plain_torch == [("decode", 2), ("varlen", 330)]


@pytest.mark.usefixtures("on_a_gpu_of_plain_torch")
def test_prompts_alone_and_single_tokens_alone_are_one_call(on_a_gpu_of_plain_torch):
    kernels = {paged.PROMPTS: "varlen, gathered"}
    for shares, call in ((SHARES[2:], ("varlen", 330)), (SHARES[:2], ("decode", 2))):
        on_a_gpu_of_plain_torch.clear()
        found, exact = attended(shares, kernels)
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
        assert on_a_gpu_of_plain_torch == [call]


@pytest.mark.parametrize(
    ("shares", "limit"),
    [([(5, 300), (127, 127)], 2**16), ([(128, 128), (200, 200)], 300)],
    ids=["few", "long"],
)
def test_drafts_and_long_contexts_are_not_gathered(shares, limit, monkeypatch, on_a_gpu_of_plain_torch):
    monkeypatch.setattr(paged, "_MAX_GATHERED", limit)
    found, exact = attended(shares, {paged.PROMPTS: "varlen, gathered"})
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    assert [name for name, _ in on_a_gpu_of_plain_torch] == ["prompts"]


def test_gathered_rows_are_those_of_the_pages():
    """What `over_gathered` reads, against reading whole pages."""
    step, num_blocks = a_step([(128, 200)], block_size=16)
    layer, *_ = a_layer(step, num_blocks, heads=2, kv_heads=2, block_size=16, head_dim=4, pages=torch.int8)
    p = torch.arange(200)
    block = step.block_tables[0, p // 16]
    whole = from_pages(layer.keys, torch.float32)
    expected = torch.stack([whole[int(b), :, i % 16] for i, b in enumerate(block)])
    assert torch.equal(read(layer.keys, block * 16 + p % 16, torch.float32), expected)
