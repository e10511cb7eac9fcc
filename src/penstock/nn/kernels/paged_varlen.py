"""Attention over pages by PyTorch's own kernels: over gathered keys and values, or over the pages.

Gathering reads the pages once and writes them once more, which a long prompt makes up for: its attention
reads each key many times. Nothing waits for the device. Legend as in paged.py.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.nn.kernels.pages import PagedStep, from_pages, read
from penstock.nn.kernels.varlen_torch import attend_varlen

WORTH_ALONE = 512
"""Tokens of a share, on average, that make up for calls of its own."""


def over_gathered(
    q_thd: Float[Tensor, "t h d"],
    keys: Tensor,
    values: Tensor,
    step: PagedStep,
    *,
    window: int | None,
    scale: float,
    sinks: Float[Tensor, "h"] | None = None,
) -> Float[Tensor, "t h d"]:
    """Attend over the keys and values of all shares, gathered into one tensor each; `step` has spans."""
    lengths = [length for _, _, length in step.spans]
    total, longest = sum(lengths), (max(past - first for first, past, _ in step.spans), max(lengths))
    ends = torch.nn.functional.pad(step.lengths.cumsum(0, dtype=torch.int32), (1, 0))
    share = torch.repeat_interleave(step.lengths, output_size=total)
    position = torch.arange(total, device=q_thd.device) - ends[share]
    block_size = keys.shape[2]
    slots = step.block_tables[share, position // block_size] * block_size + position % block_size
    k, v = (read(pages, slots, q_thd.dtype) for pages in (keys, values))
    return attend_varlen(
        q_thd, k, v, step.query_starts, ends,
        longest=longest, window=window, scale=scale, sinks=sinks,
    )  # fmt: skip


def share_by_share(
    q_thd: Float[Tensor, "t h d"],
    keys: Tensor,
    values: Tensor,
    step: PagedStep,
    *,
    window: int | None,
    scale: float,
    sinks: Float[Tensor, "h"] | None = None,
) -> Float[Tensor, "t h d"]:
    """Attend over the gathered keys and values of one long share after the other; `step` has spans.

    Whole prompts go through SDPA, whose kernels for them are the fastest; what follows a prefix, and what has
    a window or sinks, through the variable-length kernel. Shorter shares go through that together.
    """
    if len(q_thd) < WORTH_ALONE * len(step.spans):
        return over_gathered(q_thd, keys, values, step, window=window, scale=scale, sinks=sinks)
    block_size, outs = keys.shape[2], []
    for share, (first, past, length) in enumerate(step.spans):
        blocks = step.block_tables[share, : -(-length // block_size)]
        k_kld, v_kld = (
            from_pages(pages.transpose(0, 1)[:, blocks], q_thd.dtype).flatten(1, 2)[:, :length]
            for pages in (keys, values)
        )
        q = q_thd[first:past]
        is_whole = past - first == length and (window is None or window >= length)
        if is_whole and sinks is None:
            q_hld = q.transpose(0, 1)
            out = scaled_dot_product_attention(
                q_hld[None], k_kld[None], v_kld[None], is_causal=True, scale=scale,
                enable_gqa=len(q_hld) != len(k_kld),
            )  # fmt: skip
            outs.append(out[0].transpose(0, 1))
            continue
        ends = step.query_starts[share : share + 2] - step.query_starts[share]
        lengths = torch.nn.functional.pad(step.lengths[share : share + 1], (1, 0))
        outs.append(
            attend_varlen(
                q, k_kld.transpose(0, 1), v_kld.transpose(0, 1), ends, lengths,
                longest=(len(q), length), window=window, scale=scale, sinks=sinks,
            )
        )  # fmt: skip
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def over_pages(
    q_thd: Float[Tensor, "t h d"],
    keys: Tensor,
    values: Tensor,
    step: PagedStep,
    *,
    window: int | None,
    scale: float,
    sinks: Float[Tensor, "h"] | None = None,
) -> Float[Tensor, "t h d"]:
    """Attend over the pages where they lie; pages of the dtype of queries.

    One split for each sequence, so that no result depends on the rest of the step.
    """
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    width = step.block_tables.shape[1] * keys.shape[2]
    most = 1 if len(q_thd) == len(step.lengths) else max(past - first for first, past, _ in step.spans)
    return attend_varlen(
        q_thd, k, v, step.query_starts, None, longest=(most, width), window=window, scale=scale,
        sinks=sinks, seqused_k=step.lengths, block_table=step.block_tables, num_splits=1,
    )  # fmt: skip
