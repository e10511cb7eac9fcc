"""What does attention over packed rows cost on this CPU, against a dense mask over the same rows?

    python benchmarks/attention.py --out benchmarks/results

Forward and backward of one layer's attention in float32, 8 query heads over 2 key-value heads of size 64,
on one thread. `documents` is Penstock's operator for CPUs, `loop` the same pieces as single calls of
PyTorch's attention through autograd, `dense` PyTorch's attention under a boolean mask. Figures are CPU time
as a share of dense, medians over the rounds. Document lengths are log-normal around the mean, or one a row.
"""

import argparse
import math
import statistics
from pathlib import Path

import measuring
import numpy as np
import torch
from results_file import file_result
from torch.nn.functional import scaled_dot_product_attention

from penstock.nn.kernels.layout import AttentionLayout, pieces, visibility_mask
from penstock.nn.kernels.sdpa import Masked
from penstock.nn.kernels.varlen_cpu import per_document

HEADS, KEY_VALUE_HEADS, DIM = 8, 2, 64
CASES = (  # rows, row length, mean document (0: the row), window
    (8, 512, 150, None),
    (4, 1024, 40, None),
    (2, 2048, 300, None),
    (2, 2048, 0, None),
    (1, 4096, 1000, None),
    (1, 4096, 0, 512),
    (1, 4096, 1000, 512),
)


def document_ends(rows, length, mean):
    """Return ends of documents over all rows; a row's end is always among them."""
    if not mean:
        return torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    sizes = np.random.default_rng(0).lognormal(math.log(mean) - 0.5, 1.0, 4 * rows * length // mean + 8)
    ends = np.cumsum(sizes.astype(int) + 1)
    ends = np.union1d(ends[ends < rows * length], np.arange(0, rows * length + 1, length))
    return torch.from_numpy(ends.astype(np.int32))


def loop(layout):
    """Return attention as single calls over the same pieces."""
    parts = list(pieces(layout.cu_seqlens, layout.window or 0, like=torch.empty(0)))

    def attend(q, k, v, *, scale):
        q, k, v = (t.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2) for t in (q, k, v))
        outs = [
            scaled_dot_product_attention(
                q[:, :, p.queries], k[:, :, p.keys], v[:, :, p.keys],
                attn_mask=p.mask, is_causal=p.mask is None, scale=scale, enable_gqa=True,
            )
            for p in parts
        ]  # fmt: skip
        return torch.cat(outs, 2).unflatten(2, (layout.batch, layout.seq_len))[0].transpose(0, 1)

    return attend


def work(attend, layout):
    """Return a function that attends once, forward and backward."""
    shape = (layout.batch, layout.seq_len)
    q, k, v = (
        torch.randn(*shape, heads, DIM).transpose(1, 2).requires_grad_()
        for heads in (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS)
    )

    def once():
        attend(q, k, v, scale=0.125).sum().backward()
        return shape[0] * shape[1]

    return once


def measure(case, *, rounds):
    """Return the CPU time of each way, as a share of the dense mask's."""
    rows, length, mean, window = case
    ends = document_ends(rows, length, mean)
    layout = AttentionLayout(batch=rows, seq_len=length, cu_seqlens=ends, window=window)
    ways = {
        "dense": Masked(visibility_mask(layout, device=torch.device("cpu"))),
        "documents": per_document(layout),
        "loop": loop(layout),
    }
    found = measuring.interleaved({name: work(way, layout) for name, way in ways.items()}, rounds=rounds)
    rates = {name: statistics.median(rates["per_cpu_s"]) for name, rates in found.items()}
    return {
        "rows": rows, "length": length, "documents": len(ends) - 1, "window": window,
        "share of dense": {name: round(rates["dense"] / rate, 3) for name, rate in rates.items()},
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the result")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = [measure(case, rounds=arguments.rounds) for case in CASES[: arguments.cases]]
    for case in found:
        print(case)
    if arguments.out:
        file_result(arguments.out, "attention", {"cases": found}, packages=("torch",))


if __name__ == "__main__":
    main()
