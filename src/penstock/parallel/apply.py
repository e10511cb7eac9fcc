"""The one place that knows in which order the parallelisms, recomputation and compilation are applied.

From the innermost change to the outermost: the blocks of a stage are what is sliced; slices of matrices
are what is multiplied in 8 bits and what is recomputed; what is recomputed is compiled; what is compiled
is gathered and freed as one unit.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from penstock.parallel.compile import compile_blocks
from penstock.parallel.compile_config import NOT_COMPILED, CompileConfig
from penstock.parallel.context import spread_context
from penstock.parallel.float8 import multiply_in_8_bits
from penstock.parallel.fsdp import has_work, shard
from penstock.parallel.layout import ParallelConfig
from penstock.parallel.mesh import Mesh
from penstock.parallel.pipeline import Pipeline, keep_stages, stages_of
from penstock.parallel.recompute import recompute
from penstock.parallel.recompute_plan import Mode
from penstock.parallel.tensor import slice_blocks
from penstock.parallel.vocabulary import finish_with_slices, slice_vocabulary


class Spread(NamedTuple):
    """A model that was spread over ranks."""

    stages: list[nn.Module]
    """What is gathered from a root of its own: the model, or this rank's stages of it."""
    pipeline: Pipeline | None
    """What runs them; None where every rank has all blocks."""


def apply(
    model: nn.Module,
    mesh: Mesh,
    config: ParallelConfig,
    *,
    compute_dtype: torch.dtype,
    linear: str = "compute",
    modes: Sequence[Mode] = (),
    compiled: CompileConfig = NOT_COMPILED,
) -> Spread:
    """Spread a model over the ranks of a mesh, in place; it is on the meta device, and stays there.

    Args:
        compute_dtype: of gathered parameters and activations.
        linear: how the linear layers of the blocks multiply: in `compute_dtype`, or by a recipe in 8 bits.
        modes: what each block does with its activations; none: all keep theirs.
    """
    if mesh.layout.pipeline > 1:
        keep_stages(model, mesh.pipeline, per_rank=config.stages_per_rank)
    if mesh.layout.tensor > 1:
        slice_blocks(model, mesh.state["tensor"])
        slice_vocabulary(model, mesh.state["tensor"])
    if mesh.layout.context > 1:
        spread_context(model, mesh.context, rule=config.context_rule)
    if linear != "compute":
        multiply_in_8_bits(model, linear, device=mesh.state.device_type)
    if modes:
        recompute(model, modes)
    compile_blocks(model, compiled)
    stages = {0: model}
    if mesh.layout.pipeline > 1:
        stages = stages_of(model, mesh.pipeline, per_rank=config.stages_per_rank)
    for stage in stages.values():
        _share_parameters(stage, mesh, config, compute_dtype)
    if mesh.layout.pipeline == 1:
        return Spread([model], None)
    pipeline = Pipeline(stages, mesh.pipeline, slices=mesh.layout.tensor, dtype=compute_dtype)
    model.forward = pipeline.forward  # a call of the model, for validation, passes through all stages
    return Spread([*stages.values()], pipeline)


def _share_parameters(
    stage: nn.Module, mesh: Mesh, config: ParallelConfig, compute_dtype: torch.dtype
) -> None:
    if mesh.layout.tensor > 1:
        finish_with_slices(stage, mesh.state["tensor"])
    if has_work(stage, mesh.data, compute_dtype=compute_dtype, offload=config.offload):
        shard(
            stage,
            mesh.data,
            compute_dtype=compute_dtype,
            reshard_after_forward=config.reshard_after_forward,
            offload=config.offload,
        )
