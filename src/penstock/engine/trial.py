"""Steps on a GPU before the first request: what the largest takes beside weights and pages, and compiling."""

import numpy as np
import torch
from torch import Tensor

from penstock.engine.batch import Batch
from penstock.engine.drawing.filters import choose
from penstock.engine.part import Part
from penstock.engine.sampling import Sampling


def activation_bytes(part: Part, *, tokens_per_step: int, max_sequences: int, block_size: int) -> int:
    """Return the most memory that a step took at once; the GPU's cache of freed memory is empty afterwards.

    One rank only: a step of several needs all of them.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(part.device)
    before = torch.cuda.memory_allocated(part.device)
    try_step(part, tokens_per_step=tokens_per_step, max_sequences=max_sequences, block_size=block_size)
    peak = torch.cuda.max_memory_allocated(part.device)
    torch.cuda.empty_cache()
    return peak - before


def try_step(part: Part, *, tokens_per_step: int, max_sequences: int, block_size: int) -> None:
    """Compute steps of answers, then a prompt as long as a step; draw as many tokens from it as a step may.

    What kernels are compiled for (docs/adr/0040) is compiled here and not in a request.
    """
    num_tokens = min(tokens_per_step, part.model.config.context)
    for num_answers in (1, 32, 64):
        if num_answers <= min(max_sequences, num_tokens):
            _compute(part, [1] * num_answers, num_rows=num_answers, block_size=block_size)
    num_rows = min(num_tokens, max_sequences)
    logits = _compute(part, [num_tokens], num_rows=num_rows, block_size=block_size)
    # with an order of all: the dearest
    choose(logits, [Sampling(top_p=0.9)] * num_rows, [0.5] * num_rows)


def _compute(part: Part, lengths: list[int], *, num_rows: int, block_size: int) -> Tensor:
    """Return logits of the first tokens of a step of texts as long, which begin with it."""
    blocks = -(-max(lengths) // block_size)
    tables = np.arange(len(lengths) * blocks, dtype=np.int32).reshape(len(lengths), blocks)
    runner = part.runner(num_blocks=tables.size, block_size=block_size)
    return runner.run(
        Batch(
            token_ids=np.zeros(sum(lengths), np.int64),
            positions=np.concatenate([np.arange(length) for length in lengths]),
            slots=np.concatenate(
                [
                    first * block_size + np.arange(length)
                    for first, length in zip(tables[:, 0], lengths, strict=True)
                ]
            ),
            query_starts=np.cumsum([0, *lengths], dtype=np.int32),
            lengths=np.array(lengths, np.int32),
            block_tables=tables,
            logit_rows=np.arange(num_rows),
            adapters=np.full(len(lengths), -1, np.int32),
        )
    ).logits
