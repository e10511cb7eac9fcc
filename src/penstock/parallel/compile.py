"""Compile each block of a model with `torch.compile`, whole: a graph break is an error.

Blocks are compiled one by one, not the model: they are alike, so the first one's program serves all, and the
hooks that gather and free a block's parameters stay outside of it. As in `recompute`, a block's `forward` is
replaced, so names do not change. Programs are kept on disk and found again by later runs.
"""

from pathlib import Path
from typing import cast

import torch
from torch import nn

from penstock.core.env import cache_folder, set_compiled_programs
from penstock.parallel.compile_config import CompileConfig

_MOST_PROGRAMS = 64


def compile_blocks(model: nn.Module, config: CompileConfig, *, backend: str = "inductor") -> None:
    """Have each block compiled when it is first called, in place; nothing where it is not enabled.

    Args:
        model: `model.layers` are the blocks.
        backend: torch's name of what turns graphs into programs.
    """
    if not config.enabled:
        return
    if backend == "inductor":
        set_compiled_programs(
            Path(config.cache) if config.cache else cache_folder() / "compiled", given=bool(config.cache)
        )
    # torch gives up a function after 8 programs; here that would end a run whose batches change shape
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_PROGRAMS)
    mode = config.mode if backend == "inductor" else None
    for block in cast(nn.ModuleList, model.layers):
        block.forward = torch.compile(block.forward, backend=backend, mode=mode, fullgraph=True)
