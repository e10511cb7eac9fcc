"""Steps over pages in any order, and attention to them written out in float64."""

import numpy as np
import torch

from penstock.nn.kernels.paged import LayerPages
from penstock.nn.kernels.pages import PagedStep, read, to_pages


def a_step(shares, *, block_size, seed=0, device="cpu"):
    """A step of shares (tokens, length): each sequence's blocks are drawn from one pool without order."""
    rng = np.random.default_rng(seed)
    needed = [-(-length // block_size) for _, length in shares]
    pool = rng.permutation(sum(needed) + 3)
    tables = np.zeros((len(shares), max(needed)), dtype=np.int32)
    slots = []
    for share, (num_tokens, length) in enumerate(shares):
        tables[share, : needed[share]] = pool[sum(needed[:share]) :][: needed[share]]
        positions = np.arange(length - num_tokens, length)
        slots += (tables[share, positions // block_size] * block_size + positions % block_size).tolist()
    step = PagedStep.from_arrays(
        slots=np.array(slots, dtype=np.int64),
        query_starts=np.cumsum([0, *(tokens for tokens, _ in shares)], dtype=np.int32),
        lengths=np.array([length for _, length in shares], dtype=np.int32),
        block_tables=tables,
        device=torch.device(device),
    )
    return step, len(pool)


def a_layer(
    step, num_blocks, *, kv_heads, heads, block_size, head_dim, dtype=torch.float32, pages=None, seed=0
):
    """Pages full of numbers, and a step's queries, keys and values, [1, heads, t, head_dim].

    `pages`: their type, if it is not `dtype`.
    """
    generator = torch.Generator().manual_seed(seed)
    num_tokens = len(step.slots)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator).to(step.slots.device, dtype)

    keys, values = (
        to_pages(drawn(num_blocks, kv_heads, block_size, head_dim), pages or dtype) for _ in range(2)
    )
    q, k, v = (drawn(1, n, num_tokens, head_dim) for n in (heads, kv_heads, kv_heads))
    return LayerPages(keys, values, step), q, k, v


def a_few_sinks(heads):
    """Attention sinks of heads: some matter, one takes nearly all, and one nothing."""
    return torch.tensor([0.5, 9.0, -30.0, 1.5, -0.2])[torch.arange(heads) % 5]


def written_out(q_bhld, pages, shares, *, scale, window=None, sinks=None, softcap=None):
    """Attend one query at a time in float64; a sink is a score without a value."""
    step, block_size = pages.step, pages.keys.shape[2]
    group = q_bhld.shape[1] // pages.keys.shape[1]
    out, token = torch.zeros_like(q_bhld, dtype=torch.float64), 0
    for share, (num_tokens, length) in enumerate(shares):
        table, p = step.block_tables[share].long(), torch.arange(length, device=q_bhld.device)
        k_shd, v_shd = (
            read(t, table[p // block_size] * block_size + p % block_size, torch.float64).repeat_interleave(
                group, dim=1
            )
            for t in (pages.keys, pages.values)
        )
        for position in range(length - num_tokens, length):
            seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
            scores = torch.einsum("shd,hd->sh", k_shd[seen], q_bhld[0, :, token].double())
            scores = scale * scores
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is None:
                weights = torch.softmax(scores, dim=0)
            else:
                every = torch.cat((scores, sinks.to(scores)[None]))
                weights = torch.softmax(every, dim=0)[:-1]
            out[0, :, token] = torch.einsum("sh,shd->hd", weights, v_shd[seen])
            token += 1
    return out
