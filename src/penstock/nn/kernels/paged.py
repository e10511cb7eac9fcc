"""Paged attention: keys and values lie in pages, in any order. The reference and the choice of kernel.

A page holds `block_size` positions of one sequence, for every key-value head of one layer:

    keys, values: [num_blocks, kv_heads, block_size, head_dim], contiguous

or, in 8 bits, pages of codes and scales (pages.py). The positions of one head are neighbours in
memory, so a kernel streams them. Position p of a sequence with block table `table` is at
keys[table[p // block_size], :, p % block_size]. The tokens of a step are concatenated as [1, t]; a
`PagedStep`, made once a step, says which sequence each token belongs to. The tokens of one sequence in a
step are its share.

On CPUs one C++ operator attends (nn/native/attention/paged.cpp), on NVIDIA GPUs kernels in Triton
(paged_triton.py), or for single tokens and for prompts the candidate that was measured to be faster
(devices/kernel_choice.py). Plain PyTorch is their reference and the fallback for other types and devices. It
attends single tokens together over gathered pages, and longer shares one by one.

Legend: t tokens, s shares, w blocks of the longest table, h query heads, k key-value heads, d head dim.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int8
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.nn import native
from penstock.nn.attention import given_sinks, given_softcap
from penstock.nn.kernels.paged_varlen import over_gathered, over_pages, share_by_share
from penstock.nn.kernels.pages import PagedStep, from_pages, write
from penstock.nn.kernels.written_out import attend_written_out
from penstock.nn.triton_support import has_triton, on_device_of

MAX_GROUP = 48
"""Largest number of query heads per key-value head in the C++ operator: the rows of a tile."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Pages of one layer in one step: the `LayerCache` of a paged forward pass."""

    keys: Float[Tensor, "blocks k block_size d"] | Int8[Tensor, "blocks k block_size width"]
    values: Float[Tensor, "blocks k block_size d"] | Int8[Tensor, "blocks k block_size width"]
    step: PagedStep

    def append(self, k_bkld: Tensor, v_bkld: Tensor) -> tuple[Tensor, Tensor]:
        """Write the step's keys and values, each [1, k, t, d], to their slots; return the pages."""
        is_dense = k_bkld.stride(-1) == v_bkld.stride(-1) == 1
        if is_dense and self.keys.dtype == k_bkld.dtype and _has_kernels(k_bkld, self.keys):
            from penstock.nn.kernels.paged_triton import store  # as in `Paged.attend`

            with on_device_of(k_bkld):
                store(k_bkld, v_bkld, self.keys, self.values, self.step.slots)
            return self.keys, self.values
        for pages, x_bkld in ((self.keys, k_bkld), (self.values, v_bkld)):
            write(pages, self.step.slots, x_bkld[0].transpose(0, 1))
        return self.keys, self.values


@dataclass(frozen=True, slots=True)
class Paged:
    """Causal attention of each share over the pages of its own sequence; an `Attend` whose keys are pages."""

    step: PagedStep
    window: int | None = None
    """A query sees itself and the `window - 1` positions before it; None: all."""

    def __call__(
        self,
        q_bhld: Tensor,
        k_bksd: Tensor,
        v_bksd: Tensor,
        *,
        scale: float,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attend; q is [1, h, t, d], k and v are the pages, which already hold the step's own keys."""
        q_thd = q_bhld[0].transpose(0, 1).contiguous()
        return self.attend(q_thd, k_bksd, v_bksd, scale=scale, sinks=sinks, softcap=softcap).transpose(0, 1)[
            None
        ]

    def attend(
        self,
        q_thd: Float[Tensor, "t h d"],
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        sinks: Float[Tensor, "h"] | None = None,
        softcap: float | None = None,
    ) -> Float[Tensor, "t h d"]:
        """Attend with tokens first, the layout that the kernel reads and writes."""
        step = self.step
        how: dict[str, Any] = {"window": self.window, "scale": scale, **given_sinks(sinks)}
        how |= given_softcap(softcap)
        if _has_kernels(q_thd, keys):
            with on_device_of(q_thd):
                return _by_choice(q_thd, keys, values, step, how)
        attend = by_operator if _has_operator(q_thd, keys) else plain_attention
        return attend(q_thd, keys, values, step, **how)


_WORTH_GATHERING = 128
"""Tokens of a share, on average, that make up for gathering its keys. Drafts have fewer."""
_MAX_GATHERED = 2**16
"""Most keys that are gathered, of all shares; `gathered_bytes` counts them."""


def gathered_bytes(
    kernel: str, *, num_keys: int, kv_heads: int, head_dim: int, pages: torch.dtype, dtype: torch.dtype
) -> int:
    """Return the memory in bytes that a kernel of PROMPTS takes for gathered keys and values, at most.

    Args:
        num_keys: keys of all sequences of a step, at most.
        pages: dtype of the pages.
        dtype: dtype of the queries.

    >>> of_8b = {"kv_heads": 8, "head_dim": 128, "pages": torch.bfloat16, "dtype": torch.bfloat16}
    >>> gathered_bytes("varlen, gathered", num_keys=10**6, **of_8b) // 2**20
    256
    >>> gathered_bytes(TRITON, num_keys=10**6, **of_8b)
    0
    """
    if "gathered" not in kernel:
        return 0
    numbers = min(num_keys, _MAX_GATHERED) * kv_heads * head_dim
    codes = numbers if pages == torch.int8 else 0  # of keys, or of values, until they are widened
    return 2 * numbers * dtype.itemsize + codes


def _by_choice(
    q_thd: Tensor,
    keys: Tensor,
    values: Tensor,
    step: PagedStep,
    how: dict[str, Any],  # Any: arguments of `PageKernel`
) -> Tensor:
    """Attend by the kernels that the step names for single tokens and for longer shares.

    With a softcap Triton's kernels compute: no candidate beside them has one.
    """
    if "softcap" in how:
        return by_triton(q_thd, keys, values, step, **how)
    many, decode = step.num_singles, CANDIDATES[DECODE][step.kernels.get(DECODE, TRITON)]
    if many == len(q_thd):
        return decode(q_thd, keys, values, step, **how)
    tokens, lengths = len(q_thd) - many, [length for *_, length in step.spans[many:]]
    is_long = tokens >= _WORTH_GATHERING * len(lengths) and sum(lengths) <= _MAX_GATHERED
    attend = CANDIDATES[PROMPTS][step.kernels.get(PROMPTS, TRITON) if is_long else TRITON]
    if not many or attend is decode:
        return attend(q_thd, keys, values, step, **how)
    out = torch.empty_like(q_thd)
    out[:many] = decode(q_thd[:many], keys, values, step.singles(), **how)
    out[many:] = attend(q_thd[many:], keys, values, step.others(), **how)
    return out


def _has_operator(q_thd: Tensor, keys: Tensor) -> bool:
    """True if the C++ operator supports these arguments; otherwise plain PyTorch computes."""
    return (
        keys.device.type == "cpu"
        and q_thd.dtype in (torch.float32, torch.bfloat16)
        and keys.dtype in (q_thd.dtype, torch.int8)
        and q_thd.shape[1] <= MAX_GROUP * keys.shape[1]
        and native.is_available()
    )


def _has_kernels(q_thd: Tensor, keys: Tensor) -> bool:
    """True if the Triton kernels support these arguments."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return q_thd.dtype in kinds and keys.dtype in (q_thd.dtype, torch.int8) and has_triton(keys.device)


def plain_attention(
    q_thd: Float[Tensor, "t h d"],
    keys: Tensor,
    values: Tensor,
    step: PagedStep,
    *,
    window: int | None,
    scale: float,
    sinks: Float[Tensor, "h"] | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "t h d"]:
    """Attend in plain PyTorch.

    On CPUs each share is computed alone, so that no result depends on the length of a neighbour. Elsewhere
    the single tokens are computed together, because one small kernel per share would leave a GPU idle.

    Raises:
        ValueError: the step has no spans, and shares must be attended one by one.
    """
    out = torch.empty_like(q_thd, memory_format=torch.contiguous_format)
    together = 0 if q_thd.device.type == "cpu" else step.num_singles
    if together:
        how: dict[str, Any] = {"window": window, "scale": scale, "sinks": sinks, "softcap": softcap}
        out[:together] = _singles(q_thd[:together], keys, values, step, **how)
    if len(step.spans[together:]) != len(step.lengths) - together:  # a recorded step, without spans
        raise ValueError("shares that are attended one by one need their spans")
    for share, (first, past, length) in enumerate(step.spans[together:], together):
        since = 0 if window is None else max(0, length - (past - first) + 1 - window)
        block_size = keys.shape[2]
        skipped = since // block_size  # blocks that no query of the share sees
        blocks = step.block_tables[share, skipped : -(-length // block_size)].long()
        k, v = (
            _gathered(pages[blocks], q_thd.dtype)[:, : length - skipped * block_size]
            for pages in (keys, values)
        )
        mask = _visible(past - first, k.shape[1], window=window, device=q_thd.device)
        q = q_thd[first:past].transpose(0, 1)
        found = _sdpa(q[None], k[None], v[None], mask, scale, sinks, softcap)
        out[first:past] = found[0].transpose(0, 1)
    return out


def _singles(
    q_shd: Tensor,
    keys: Tensor,
    values: Tensor,
    step: PagedStep,
    *,
    window: int | None,
    scale: float,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    tables, lengths = step.block_tables[: len(q_shd)].long(), step.lengths[: len(q_shd), None]
    k, v = (_gathered(pages[tables], q_shd.dtype) for pages in (keys, values))
    positions = torch.arange(k.shape[2], device=k.device)[None]
    mask = positions < lengths
    if window is not None:
        mask &= positions >= lengths - window
    return _sdpa(q_shd[:, :, None], k, v, mask[:, None, None], scale, sinks, softcap)[:, :, 0]


def _gathered(pages: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., blocks, k, block_size, width] -> [..., k, blocks * block_size, d]."""
    return from_pages(pages, dtype).transpose(-4, -3).flatten(-3, -2)


def _visible(
    num_queries: int, num_keys: int, *, window: int | None, device: torch.device
) -> Bool[Tensor, "queries keys"] | None:
    """Return the mask of the last `num_queries` of `num_keys` positions; None: all keys are visible."""
    if num_queries == 1 and (window is None or num_keys <= window):
        return None
    keys = torch.arange(num_keys, device=device)
    own = keys[num_keys - num_queries :, None]
    return keys <= own if window is None else (keys <= own) & (keys > own - window)


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    if softcap is not None or sinks is not None:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        return attend_written_out(q, k, v, mask, scale=scale, sinks=sinks, softcap=softcap)
    grouped = q.shape[1] != k.shape[1]
    if grouped and mask is not None and q.device.type == "cuda":
        # on CUDA, grouped heads with a mask fall back to the unfused kernel
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        grouped = False
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def by_triton(
    q_thd: Tensor,
    keys: Tensor,
    values: Tensor,
    step: PagedStep,
    *,
    window: int | None,
    scale: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend by the kernels in Triton."""
    from penstock.nn.kernels.paged_triton import paged_attention  # takes a second that CPUs do not need

    return paged_attention(
        q_thd, keys, values, step, window=window, scale=scale, sinks=sinks, softcap=softcap
    )


def by_operator(
    q_thd: Tensor,
    keys: Tensor,
    values: Tensor,
    step: PagedStep,
    *,
    window: int | None,
    scale: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend by the C++ operator."""
    out: Tensor = torch.ops.penstock.paged_attention(
        q_thd, keys, values, step.query_starts, step.lengths, step.block_tables, scale, window or 0, sinks,
        softcap or 0.0,
    )  # fmt: skip
    return out


DECODE, PROMPTS = "pages.decode", "pages.prompts"
"""Operations: attention of single tokens, and of longer shares, over pages."""
TRITON, OVER_PAGES = "Triton", "varlen over pages"

PageKernel = Callable[..., Tensor]
"""Takes the arguments of `plain_attention`."""

CANDIDATES: Mapping[str, Mapping[str, PageKernel]] = {
    DECODE: {TRITON: by_triton, OVER_PAGES: over_pages},
    PROMPTS: {
        "SDPA and varlen, gathered": share_by_share,
        "varlen, gathered": over_gathered,
        TRITON: by_triton,
        OVER_PAGES: over_pages,
    },
}
"""Operation -> name -> kernel on GPUs, in the static order."""
