"""Kernels of an engine: attention over pages and products of few tokens, chosen once its weights are loaded.

On CPUs there is nothing to choose: the C++ operators alone give answers that do not depend on neighbours.
With `batch_invariant` the kernels in Triton compute: which others take a step depends on the tokens in it.
"""

from typing import Any

import torch

from penstock.devices import accelerator
from penstock.devices.kernel_choice import Operation, choose
from penstock.devices.kernel_table import KernelTable
from penstock.engine.config import EngineConfig
from penstock.engine.model_runner.capacity import defaults_of
from penstock.engine.workers.model_shard import ModelShard
from penstock.models.decoder.config import DecoderConfig
from penstock.nn.kernels.trials import Heads, page_operations
from penstock.nn.linear.trials import product_operations
from penstock.nn.triton_support import has_triton

_MAX_SEQUENCES, _MAX_CONTEXT = 16, 2048
"""Size of the timed steps: their keys and values exceed a second-level cache."""


def choose_kernels(part: ModelShard, config: EngineConfig) -> KernelTable:
    """Return the kernels of an engine, chosen by its first rank.

    Args:
        part: the first rank's shard.

    Raises:
        UsageError, ConfigError, PenstockError: as `kernel_choice.choose`.
    """
    operations = operations_of(
        part.model.config, config, dtype=part.dtype, pages=part.pages_dtype, device=part.device
    )
    table = choose(operations, part.device, setting=str(config.kernels))
    if accelerator.is_accelerator(part.device):
        accelerator.free_cache()
    return table


def operations_of(
    model: DecoderConfig,
    config: EngineConfig,
    *,
    dtype: torch.dtype,
    pages: torch.dtype,
    device: torch.device,
) -> list[Operation[Any]]:  # Any: each has cases of its own
    """Return the operations of an engine that have several kernels.

    Args:
        model: sizes of a rank's shard.
        dtype: of activations.
        pages: of keys and values.
    """
    if not has_triton(device) or config.batch_invariant:
        return []
    context = min(_MAX_CONTEXT, config.max_context or model.context)
    windows = list(model.windows)
    sizes = Heads(
        heads=model.num_attention_heads,
        kv_heads=model.key_value_heads,
        head_dim=model.size_of_head,
        dtype=dtype,
        device=device,
        has_sinks=model.family.has_sinks,
    )
    merged = (2 if model.family.has_gate else 1) * model.intermediate_size
    products = product_operations(
        config.weights, outputs=merged, inputs=model.hidden_size, dtype=dtype, device=device
    )
    if model.attn_logit_softcapping is not None:
        return [*products]  # Triton's kernels alone cap scores
    return [
        *page_operations(
            sizes,
            pages=pages,
            block_size=config.block_size,
            sequences=min(_MAX_SEQUENCES, config.max_sequences),
            prompt=min(context, defaults_of(device.type).piece_tokens),
            context=context,
            window=max(windows, key=windows.count),
        ),
        *products,
    ]
