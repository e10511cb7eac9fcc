"""Attention as operations with candidates: their tests against float64, and what is timed.

Attention of training is tested and timed with its gradients. Tests have documents and shares of uneven
lengths; what is timed has the sizes of the run.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.devices.kernel_choice import Call, Operation
from penstock.nn.attention import given_sinks
from penstock.nn.kernels import choose, paged
from penstock.nn.kernels.layout import AttentionLayout
from penstock.nn.kernels.pages import PagedStep, from_pages, to_pages
from penstock.nn.kernels.varlen_torch import has_log_sums, has_pages, is_available
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
    has_sinks: bool = False
    """True if query heads have attention sinks."""

    def __str__(self) -> str:
        """Return the sizes as part of a table's key."""
        dtype = str(self.dtype).removeprefix("torch.")
        sinks = " with sinks" if self.has_sinks else ""
        return f"{self.heads} heads of {self.kv_heads}{sinks}, {self.head_dim} wide, {dtype}"

    def drawn(self) -> Callable[..., Tensor]:
        """Return a source of normal numbers, the same at each call."""
        generator = torch.Generator(self.device).manual_seed(0)
        return partial(torch.randn, generator=generator, dtype=self.dtype, device=self.device)

    def drawn_sinks(self) -> Tensor | None:
        """Return the sinks of the heads; None: they have none."""
        return self.drawn()(self.heads) if self.has_sinks else None


Rows = tuple[AttentionLayout, tuple[Tensor, ...], Tensor]
"""A micro-batch of training: layout; queries, keys, values and, if there are any, sinks; and the gradient of
the result."""


def attention_operations(
    sizes: Heads, *, rows: int, length: int, windows: Collection[int | None] = (None,)
) -> list[Operation[Rows]]:
    """Return the operations of attention in training.

    Args:
        rows, length: of a micro-batch.
        windows: attention windows of the layers.
    """
    narrow = [window for window in windows if window is not None and window < length]
    num_rows = max(1, min(rows, _MAX_TOKENS // length))
    loads = _layouts(num_rows, length, _DOCUMENT, min(narrow, default=0), sizes.device)
    trials = _layouts(2, 509, 0.41, 37, sizes.device)
    if len(narrow) == len(set(windows)):  # no layer sees whole rows or documents
        loads = {choose.WINDOW: loads[choose.WINDOW]}
    return [_attention(sizes, name, trials[name], load) for name, load in loads.items()]


def _attention(sizes: Heads, name: str, trial: AttentionLayout, load: AttentionLayout) -> Operation[Rows]:
    like = torch.empty(0, sizes.head_dim, dtype=sizes.dtype, device=sizes.device)
    found = {
        kernel: partial(_attended, make)
        for kernel, make in choose.candidates_of(name, has_sinks=sizes.has_sinks).items()
        # those that cost more are not made to find out whether they are here
        if (has_triton(sizes.device) if kernel in choose.COSTLY else make(trial, like) is not None)
    }
    return Operation(
        name=name,
        shape=f"{load.batch} x {load.seq_len}{_of_window(load.window)}, {sizes}",
        kernels=found,
        costly=choose.COSTLY & found.keys(),
        trial=partial(_rows, sizes, trial),
        load=partial(_rows, sizes, load),
        exact=_exact_rows,
        near=NEAR[sizes.dtype],
    )


def _of_window(window: int | None) -> str:
    return f", window of {window}" if window else ""


def _layouts(
    rows: int, length: int, document: float, window: int, device: torch.device
) -> dict[str, AttentionLayout]:
    cuts = range(0, rows * length, max(1, int(document * length)))
    ends = sorted({*cuts, 1, *range(0, rows * length + 1, length)})
    whole = AttentionLayout(batch=rows, seq_len=length)
    packed = replace(whole, cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device))
    found = {choose.ROWS: whole, choose.DOCUMENTS: packed}
    return {**found, choose.WINDOW: replace(packed, window=window)} if window else found


def _rows(sizes: Heads, layout: AttentionLayout) -> Rows:
    drawn = sizes.drawn()
    q, k, v, upstream = (
        drawn(layout.batch, layout.seq_len, heads, sizes.head_dim).transpose(1, 2).requires_grad_()
        for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
    )
    sinks = sizes.drawn_sinks()
    return layout, (q, k, v, *([] if sinks is None else [sinks.requires_grad_()])), upstream


def _attended(make: choose.Candidate, case: Rows) -> Call:
    layout, given, upstream = case
    (q, k, v), sinks = given[:3], {"sinks": given[3]} if len(given) > 3 else {}
    attend = make(layout, q)
    if attend is None:
        raise LookupError("the device has no such kernel for these documents")

    @torch.enable_grad()
    def call() -> Sequence[Tensor]:
        out = attend(q, k, v, scale=q.shape[-1] ** -0.5, **sinks)
        return out, *torch.autograd.grad(out, given, upstream)

    return call


def _exact_rows(case: Rows) -> Sequence[Tensor]:
    layout, given, upstream = case
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in given)
    return _attended(choose.masked, (layout, exact, upstream.double()))()


Pages = tuple[Tensor, Tensor, Tensor, PagedStep, int | None, Tensor | None]
"""Queries of a step, one layer's pages of keys and of values, the step, a window, and sinks."""


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
    """Return the operations of attention over pages, on devices that have Triton.

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
    has_varlen = is_available(device=sizes.device, dtype=sizes.dtype, head_dim=sizes.head_dim)
    has_varlen = has_varlen and (has_log_sums() or not sizes.has_sinks)
    reads_pages = has_varlen and has_pages() and pages == sizes.dtype
    is_here = {paged.TRITON: True, paged.OVER_PAGES: reads_pages}
    return [
        Operation(
            name=name,
            shape=f"{len(loads[name])} x {loads[name][0][1]}, pages of {block_size}, {words}, {sizes}"
            + _of_window(window),
            kernels={
                kernel: partial(_over_pages, attend)
                for kernel, attend in paged.CANDIDATES[name].items()
                if is_here.get(kernel, has_varlen)
            },
            trial=partial(made, trials[name], 45 if window else None),
            load=partial(made, loads[name], window),
            exact=_exact_pages,
            near=NEAR[sizes.dtype],
            is_replayed=name == paged.DECODE,
        )
        for name in trials
    ]


def _pages(
    sizes: Heads, dtype: torch.dtype, block_size: int, shares: Sequence[tuple[int, int]], window: int | None
) -> Pages:
    """Return a step of shares (tokens, keys), whose blocks lie in no order."""
    drawn = sizes.drawn()
    widest = -(-max(length for _, length in shares) // block_size)
    blocks = np.random.default_rng(0).permutation(len(shares) * widest).astype(np.int32)
    tokens = sum(count for count, _ in shares)
    step = PagedStep.from_arrays(
        slots=np.zeros(tokens, np.int64),
        query_starts=np.cumsum([0, *(count for count, _ in shares)], dtype=np.int32),
        lengths=np.array([length for _, length in shares], np.int32),
        block_tables=blocks.reshape(len(shares), widest),
        device=sizes.device,
    )
    shape = (len(blocks), sizes.kv_heads, block_size, sizes.head_dim)
    keys, values = (to_pages(drawn(*shape), dtype) for _ in range(2))
    return drawn(tokens, sizes.heads, sizes.head_dim), keys, values, step, window, sizes.drawn_sinks()


def _over_pages(attend: paged.PageKernel, case: Pages) -> Call:
    *tensors, window, sinks = case
    scale = case[0].shape[-1] ** -0.5

    @torch.no_grad()
    def call() -> Sequence[Tensor]:
        return (attend(*tensors, window=window, scale=scale, **given_sinks(sinks)),)

    return call


def _exact_pages(case: Pages) -> Sequence[Tensor]:
    q, keys, values, step, window, sinks = case
    wide = q.double(), from_pages(keys, torch.float64), from_pages(values, torch.float64)
    exact = *wide, step, window, None if sinks is None else sinks.double()
    return _over_pages(paged.plain_attention, exact)()
