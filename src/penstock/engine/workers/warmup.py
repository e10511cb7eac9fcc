"""Trial steps on a GPU before the first request: peak activation memory, and kernel compilation."""

from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from penstock.core.log import EventLog
from penstock.devices import accelerator
from penstock.engine.model_runner.batch import StepBatch
from penstock.engine.model_runner.graph_plan import fixed_bytes
from penstock.engine.sampling.filters import choose
from penstock.engine.sampling_params import Sampling
from penstock.engine.workers.model_shard import ModelShard
from penstock.nn.kernels.paged import PROMPTS, gathered_bytes
from penstock.nn.triton_support import has_triton

log = EventLog(__name__)


def activation_bytes(
    part: ModelShard, *, tokens_per_step: int, max_sequences: int, block_size: int, context: int
) -> int:
    """Return the peak memory of a step in bytes; the allocator's cache is empty afterwards.

    A trial step gives it, and to that comes what prompts after long prefixes gather from the pages: the
    trial's prompt has no prefix. For one rank only: a step of several ranks needs all of them.
    """
    before = accelerator.forget_peak(part.device)
    try_step(part, tokens_per_step=tokens_per_step, max_sequences=max_sequences, block_size=block_size)
    peak = accelerator.peak_bytes(part.device)
    accelerator.free_cache()
    gathered = partial(
        gathered_bytes,
        part.kernels.get(PROMPTS, ""),
        kv_heads=part.model.config.key_value_heads,
        head_dim=part.model.config.size_of_head,
        pages=part.pages_dtype,
        dtype=part.dtype,
    )
    tried = min(tokens_per_step, part.model.config.context)
    return peak - before + gathered(num_keys=max(tried, max_sequences * context)) - gathered(num_keys=tried)


def try_step(part: ModelShard, *, tokens_per_step: int, max_sequences: int, block_size: int) -> None:
    """Compute decode steps and a prompt as long as a step, then sample the maximum number of tokens.

    Kernels that depend on sizes (docs/adr/0040) are compiled here and not during a request.
    """
    num_tokens = min(tokens_per_step, part.model.config.context)
    for num_answers in (1, 32, 64):
        if num_answers <= min(max_sequences, num_tokens):
            _compute(part, [1] * num_answers, num_rows=num_answers, block_size=block_size)
    num_rows = min(num_tokens, max_sequences)
    logits = _compute(part, [num_tokens], num_rows=num_rows, block_size=block_size)
    choose(logits, None)
    # in plain torch top-p sorts the vocabulary: the most expensive filter
    choose(logits, [Sampling(top_p=0.9)] * num_rows, [0.5] * num_rows)


def graph_bytes(part: ModelShard, *, max_sequences: int, max_blocks: int, block_size: int) -> int:
    """Return the memory of the CUDA graphs of decode steps in bytes: the peak of the largest, uncaptured,
    with their inputs, results and workspace.

    The graphs share it (model_runner/decode_graphs.py); a graph's own records of its kernels are not in it.
    """
    before = accelerator.forget_peak(part.device)
    ones = [1] * max_sequences
    try:
        logits = _compute(part, ones, num_rows=max_sequences, block_size=block_size, width=max_blocks)
        choose(logits, [Sampling(top_p=0.9)] * max_sequences, [0.5] * max_sequences)
        del logits
    except torch.OutOfMemoryError:
        log.warning(
            "graphs_too_large",
            "A step of {sequences} sequences does not fit into memory: the largest graphs are left out",
            sequences=max_sequences,
        )
        return 0
    finally:
        peak = accelerator.peak_bytes(part.device)
        accelerator.free_cache()
    fixed = fixed_bytes(
        part.model.config,
        max_sequences=max_sequences,
        max_blocks=max_blocks,
        num_groups=len(part.groups),
        number_bytes=part.dtype.itemsize,
    )
    return peak - before + fixed


def compile_draws(part: ModelShard) -> None:
    """Compile the kernels that sample: for logits of the model's type, and for float32, which changed logits
    have.

    Without it the first request with a grammar, a penalty or a bias would compile them. Nothing where draws
    are not compiled.
    """
    if not has_triton(part.device):
        return
    widths = {part.model.config.vocab_size + new for new in (0, *part.adapters.num_new_tokens.values())}
    for dtype, width in product({part.dtype, torch.float32}, widths):
        logits = torch.zeros(1, width, dtype=dtype, device=part.device)
        choose(logits, None)
        choose(logits, [Sampling(top_p=0.9)], [0.5])


def _compute(
    part: ModelShard, lengths: list[int], *, num_rows: int, block_size: int, width: int = 0
) -> Tensor:
    """Return logits of the first `num_rows` tokens of a step with prompts of these lengths.

    Args:
        width: width of the block tables, of one block that all prompts write to; 0: blocks of their own.
    """
    blocks = width or -(-max(lengths) // block_size)
    tables = np.zeros((len(lengths), blocks), np.int32)
    if not width:
        tables.flat[:] = np.arange(tables.size)
    num_groups = len(part.groups)  # which may share blocks here: nothing reads what they hold
    runner = part.runner(num_blocks=int(tables.max()) + 1, block_size=block_size)
    return runner.run(
        StepBatch(
            token_ids=np.zeros(sum(lengths), np.int64),
            positions=np.concatenate([np.arange(length) for length in lengths]),
            slots=np.tile(
                np.concatenate(
                    [
                        first * block_size + np.arange(length)
                        for first, length in zip(tables[:, 0], lengths, strict=True)
                    ]
                ),
                (num_groups, 1),
            ),
            query_starts=np.cumsum([0, *lengths], dtype=np.int32),
            lengths=np.array(lengths, np.int32),
            block_tables=np.tile(tables, (num_groups, 1, 1)),
            logit_rows=np.arange(num_rows),
            adapters=np.full(len(lengths), -1, np.int32),
        )
    ).logits
