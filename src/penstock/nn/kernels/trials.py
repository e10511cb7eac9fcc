"""Attention as operations with candidates: their tests against float64, and what is timed.

Attention of training is tested and timed with its gradients. Tests have documents and shares of uneven
lengths; what is timed has the sizes of the run.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.devices.kernel_trial import Call, Candidate, Operation
from penstock.nn import native
from penstock.nn.kernels import choose, paged
from penstock.nn.kernels.layout import AttentionLayout, visibility_mask
from penstock.nn.kernels.pages import PagedStep, from_pages, to_pages
from penstock.nn.kernels.varlen_torch import has_pages, is_available
from penstock.nn.triton_support import has_triton

NEAR = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest error, of the largest value: roundings of weights, sums and results."""
_MAX_TOKENS = 8192
"""Tokens that are timed: more take as long each."""
_DOCUMENT = 0.22
"""Length of a timed document, as a share of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Sizes of an attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        """Return the sizes as part of a table's key."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.heads} heads of {self.kv_heads}, {self.head_dim} wide, {dtype}"

    def drawn(self) -> Callable[..., Tensor]:
        """Return a source of normal numbers, the same at each call."""
        generator = torch.Generator(self.device).manual_seed(0)
        return partial(torch.randn, generator=generator, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A micro-batch of training: inputs of attention, and the gradient of its result."""

    layout: AttentionLayout
    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor


def attention_operations(
    sizes: Heads, *, rows: int, length: int, windows: Collection[int | None] = (None,)
) -> list[Operation[Rows]]:
    """Return the operations of attention in training.

    Args:
        rows, length: of a micro-batch.
        windows: attention windows of the layers.
    """
    narrow = [window for window in windows if window is not None and window < length]
    layouts = _layouts(max(1, min(rows, _MAX_TOKENS // length)), length, _DOCUMENT, min(narrow, default=0))
    trials = _layouts(2, 509, 0.41, 37)
    if len(narrow) == len(set(windows)):  # no layer sees whole rows or documents
        layouts = {choose.WINDOW: layouts[choose.WINDOW]}
    return [_attention(name, sizes, trials[name], layout) for name, layout in layouts.items()]


def _layouts(rows: int, length: int, document: float, window: int) -> dict[str, AttentionLayout]:
    cuts = range(0, rows * length, max(1, int(document * length)))
    ends = torch.tensor(sorted({*cuts, 1, *range(0, rows * length + 1, length)}), dtype=torch.int32)
    whole = AttentionLayout(batch=rows, seq_len=length)
    packed = replace(whole, cu_seqlens=ends)
    found = {choose.ROWS: whole, choose.DOCUMENTS: packed}
    return {**found, choose.WINDOW: replace(packed, window=window)} if window else found


def _attention(name: str, sizes: Heads, trial: AttentionLayout, load: AttentionLayout) -> Operation[Rows]:
    how = {"device": sizes.device, "dtype": sizes.dtype, "head_dim": sizes.head_dim}
    of_window = f", window of {load.window}" if load.is_windowed else ""
    return Operation(
        name=name,
        shape=f"{load.batch} x {load.seq_len}{of_window}, {sizes}",
        candidates=[
            Candidate(
                name=kernel, prepare=partial(_with_gradients, make, how), cost=choose.COSTS.get(kernel, "")
            )
            for kernel, make in choose.CANDIDATES[name].items()
            if _is_here(kernel, make, trial, how)
        ],
        trial=partial(_rows, sizes, trial),
        load=partial(_rows, sizes, load),
        exact=_exact_rows,
        near=NEAR[sizes.dtype],
    )


def _is_here(kernel: str, make: choose.Make, trial: AttentionLayout, how: dict[str, Any]) -> bool:
    """True if a device has a kernel; those that cost more are not made to find that out."""
    if kernel in choose.COSTS:
        return has_triton(how["device"])
    return make(_on(trial, how["device"]), **how) is not None


def _on(layout: AttentionLayout, device: torch.device) -> AttentionLayout:
    return layout if layout.cu_seqlens is None else replace(layout, cu_seqlens=layout.cu_seqlens.to(device))


def _rows(sizes: Heads, layout: AttentionLayout) -> Rows:
    drawn = sizes.drawn()
    q, k, v, upstream = (
        drawn(layout.batch, layout.seq_len, heads, sizes.head_dim).transpose(1, 2)
        for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
    )
    on_device = _on(layout, sizes.device)
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    return Rows(layout=on_device, q=q, k=k, v=v, upstream=upstream)


def _with_gradients(make: choose.Make, how: dict[str, object], case: Rows) -> Call:
    attend = make(case.layout, **how)
    if attend is None:
        raise LookupError("the device has no such kernel for these documents")

    @torch.enable_grad()
    def call() -> Sequence[Tensor]:
        out = attend(case.q, case.k, case.v, scale=case.q.shape[-1] ** -0.5)
        return out, *torch.autograd.grad(out, (case.q, case.k, case.v), case.upstream)

    return call


def _exact_rows(case: Rows) -> Sequence[Tensor]:
    with torch.enable_grad():
        q, k, v = (tensor.detach().double().requires_grad_() for tensor in (case.q, case.k, case.v))
        groups = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * q.shape[-1] ** -0.5
        hidden = ~visibility_mask(case.layout, device=q.device)
        out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.repeat_interleave(groups, 1)
        return out, *torch.autograd.grad(out, (q, k, v), case.upstream.double())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Queries of a step, and one layer's pages."""

    q: Tensor
    keys: Tensor
    values: Tensor
    step: PagedStep
    window: int | None


def page_operations(
    sizes: Heads,
    *,
    pages: torch.dtype,
    block_size: int,
    sequences: int,
    prompt: int,
    context: int,
    window: int | None = None,
) -> list[Operation[Pages]]:
    """Return the operations of attention over pages.

    Args:
        pages: dtype of the pages.
        sequences: single tokens of a timed step.
        prompt: tokens of a timed prompt.
        context: keys of each timed sequence.
        window: of most layers.
    """
    made = partial(_pages, sizes, pages, block_size)
    trials = {
        paged.DECODE: [(1, 1), (1, 77), (1, 300)],
        paged.PROMPTS: [(1301, 1301), (201, 333), (130, 130)],
    }
    loads = {paged.DECODE: [(1, context)] * sequences, paged.PROMPTS: [(prompt, prompt)]}
    words = "8 bits" if pages == torch.int8 else "of that dtype"
    return [
        Operation(
            name=name,
            shape=f"{len(loads[name])} x {loads[name][0][1]}, pages of {block_size}, {words}, {sizes}"
            + (f", window of {window}" if window else ""),
            candidates=[
                Candidate(name=kernel, prepare=partial(_over_pages, attend))
                for kernel, attend in _page_kernels(name, sizes, pages).items()
            ],
            trial=partial(made, trials[name], 45 if window else None),
            load=partial(made, loads[name], window),
            exact=_exact_pages,
            near=NEAR[sizes.dtype],
            is_replayed=name == paged.DECODE,
        )
        for name in trials
    ]


def _page_kernels(operation: str, sizes: Heads, pages: torch.dtype) -> dict[str, paged.PageKernel]:
    """Return the kernels that there are for such pages on a device, in the static order."""
    if not has_triton(sizes.device):
        first = {paged.OPERATOR: paged.by_operator} if native.is_available() else {}
        return {**first, "SDPA, gathered": paged.plain_attention}
    has_varlen = is_available(device=sizes.device, dtype=sizes.dtype, head_dim=sizes.head_dim)
    reads_pages = has_varlen and has_pages() and pages == sizes.dtype
    is_here = {
        "SDPA and varlen, gathered": has_varlen,
        "varlen, gathered": has_varlen,
        "varlen over pages": reads_pages,
    }
    return {n: kernel for n, kernel in paged.CANDIDATES[operation].items() if is_here.get(n, True)}


def _pages(
    sizes: Heads, dtype: torch.dtype, block_size: int, shares: Sequence[tuple[int, int]], window: int | None
) -> Pages:
    """Return a step of shares (tokens, keys), whose blocks lie in no order."""
    drawn = sizes.drawn()
    needed = [-(-length // block_size) for _, length in shares]
    blocks = np.random.default_rng(0).permutation(sum(needed)).astype(np.int32)
    tables = np.zeros((len(shares), max(needed)), np.int32)
    for table, own, past in zip(tables, needed, np.cumsum(needed), strict=True):
        table[:own] = blocks[past - own : past]
    tokens = sum(count for count, _ in shares)
    step = PagedStep.from_arrays(
        slots=np.zeros(tokens, np.int64),
        query_starts=np.cumsum([0, *(count for count, _ in shares)], dtype=np.int32),
        lengths=np.array([length for _, length in shares], np.int32),
        block_tables=tables,
        device=sizes.device,
    )
    shape = (len(blocks), sizes.kv_heads, block_size, sizes.head_dim)
    keys, values = (to_pages(drawn(*shape), dtype) for _ in range(2))
    q = drawn(tokens, sizes.heads, sizes.head_dim)
    return Pages(q=q, keys=keys, values=values, step=step, window=window)


def _over_pages(attend: paged.PageKernel, case: Pages) -> Call:
    @torch.no_grad()
    def call() -> Sequence[Tensor]:
        scale = case.q.shape[-1] ** -0.5
        return (attend(case.q, case.keys, case.values, case.step, window=case.window, scale=scale),)

    return call


def _exact_pages(case: Pages) -> Sequence[Tensor]:
    keys, values = (from_pages(pages, torch.float64) for pages in (case.keys, case.values))
    scale = case.q.shape[-1] ** -0.5
    return (paged.plain_attention(case.q.double(), keys, values, case.step, window=case.window, scale=scale),)
