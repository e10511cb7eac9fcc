"""One step of the full size on a GPU, to see what it needs beside weights and pages."""

import numpy as np
import torch

from penstock.engine.batch import Batch
from penstock.engine.filters import choose
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
    """Compute one answer's token and a prompt that fills the step, and draw as many tokens as steps may.

    Both kinds of shares, so that whatever attends to either is compiled now and not in a request.
    """
    num_tokens = min(tokens_per_step, part.model.config.context)
    num_blocks = -(-num_tokens // block_size)
    positions = np.arange(num_tokens - 1)
    prompt_blocks = np.arange(1, num_blocks + 1, dtype=np.int32)
    output = part.runner(num_blocks=num_blocks + 1, block_size=block_size).run(
        Batch(
            token_ids=np.zeros(num_tokens, np.int64),
            positions=np.concatenate([[0], positions]),
            slots=np.concatenate([[0], block_size + positions]),
            query_starts=np.array([0, 1, num_tokens], np.int32),
            lengths=np.array([1, num_tokens - 1], np.int32),
            block_tables=np.stack([np.zeros_like(prompt_blocks), prompt_blocks]),
            logit_rows=np.arange(min(num_tokens, max_sequences)),
            adapters=np.array([-1, -1], np.int32),
        )
    )
    rows = len(output.logits)
    choose(output.logits, [Sampling(top_p=0.9)] * rows, [0.5] * rows)  # with an order of all: the dearest
