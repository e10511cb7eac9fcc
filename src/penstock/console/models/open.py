"""Opening a checkpoint of a run on the CPU, where it takes no memory from a job on the GPU."""

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.checkpoint.find import find
from penstock.core import env
from penstock.core.errors import PenstockError
from penstock.core.units import mib
from penstock.engine.config import EngineConfig
from penstock.models.llama.config import LlamaConfig

if TYPE_CHECKING:
    from penstock.engine.llm import LLM

MOST_CONTEXT = 4096
"""Tokens of a prompt and its answer together."""
MOST_SEQUENCES = 16
_CACHED_CONTEXTS = 4
_BLOCK = 16
_FLOAT32 = 4
_RESERVE = 1.25
"""Memory asked for over that of the weights: layers are packed one by one."""


class ScoringModel:
    """A model that scores rows."""

    def __init__(self, run: Path, step: int) -> None:
        check_room(run, step, cache_bytes=0)
        from penstock.engine.model_runner.open import open_model  # torch

        self._model, _ = open_model(run, step=step)

    def losses(self, batch: dict[str, Any]) -> npt.NDArray[np.float32]:
        """Return the loss of each label of some rows, [rows, length]; see `token_losses`."""
        from penstock.train.inspect.token_losses import token_losses

        return token_losses(self._model, batch)

    def close(self) -> None:
        """Free it."""
        del self._model
        gc.collect()


def check_room(run: Path, step: int, *, cache_bytes: int) -> LlamaConfig:
    """Return the config of a checkpoint's model, if the memory has room for it.

    Raises:
        PenstockError: it would not fit.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    meta = find(run, step=step).index().meta
    copies = 1 if meta.adapter is None else 2  # the merged matrices are made beside the base
    needed = int(_RESERVE * copies * _FLOAT32 * meta.model.num_parameters) + cache_bytes
    free = env.available_bytes()
    if needed > free:
        raise PenstockError(
            f"The model of step {step:,} would take {mib(needed)} of memory, and {mib(free)} are free",
            fix="Open it on another machine with `penstock chat`.",
        )
    return meta.model


def open_answering(run: Path, step: int) -> "LLM":
    """Return an engine over a checkpoint, with a bounded cache of keys and values; the caller closes it.

    Raises:
        PenstockError: as in `check_room`.
        ModelError: the run has no tokenizer.
    """
    model = find(run, step=step).index().meta.model
    context = min(model.context, MOST_CONTEXT)
    per_token = 2 * model.num_hidden_layers * model.key_value_heads * model.size_of_head * _FLOAT32
    cache_bytes = per_token * (_CACHED_CONTEXTS * context + _BLOCK)
    check_room(run, step, cache_bytes=cache_bytes)
    from penstock.engine.assemble import engine_of  # torch
    from penstock.engine.llm import LLM
    from penstock.engine.model_runner.open import open_model

    opened, tokenizer = open_model(run, step=step)
    config = EngineConfig(
        max_context=context,
        max_sequences=MOST_SEQUENCES,
        block_size=_BLOCK,
        cache_gib=cache_bytes / 2**30,
        compile="off",
    )
    return LLM.of(engine_of(opened, config, tokenizer_path=tokenizer))
