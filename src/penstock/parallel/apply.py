"""Apply all parallelisms, activation checkpointing, float8 and compilation, in the required order.

From the innermost change to the outermost: the blocks of a stage are sliced; slices of matrices are
multiplied in 8 bits and recomputed; recomputed blocks are compiled; compiled blocks are gathered and freed as
one unit. On a rank that shares parameters with no other, nothing is gathered, and blocks cast them instead.

Blocks are compiled one by one, not the model: they are alike, so one program serves all, and the hooks that
gather and free a block's parameters stay outside of it. As in `recompute`, a block's `forward` is replaced,
so names do not change. Programs are cached on disk for later runs.

A parallelism is imported where it is used: FSDP2, DTensors and pipelines take seconds to import.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.core.env import cache_folder, set_compiled_programs
from penstock.nn.dtensor import local
from penstock.nn.linear.adapter_config import AdapterConfig
from penstock.nn.linear.dropout import with_token_keys
from penstock.nn.linear.float8 import (
    RECIPES,
    Float8TrainingLinear,
    Multiply,
    Recipe,
    find_scales_at_once,
    has_native,
    may_compile,
)
from penstock.nn.triton_support import compiles
from penstock.parallel.activation_checkpointing import recompute
from penstock.parallel.activation_checkpointing_plan import Mode
from penstock.parallel.config import NOT_COMPILED, CompileConfig
from penstock.parallel.layout import ParallelConfig
from penstock.parallel.mesh import Mesh
from penstock.parallel.sharding.compute_dtype import compute_blocks_in, compute_in

if TYPE_CHECKING:
    from penstock.parallel.pipeline import Pipeline


class ParallelModel(NamedTuple):
    """A parallelised model."""

    stages: list[nn.Module]
    """The model, or this rank's pipeline stages; each an FSDP root where parameters are shared."""
    pipeline: "Pipeline | None"
    """Runs the stages; None: every rank has all blocks."""
    shares: bool
    """True if FSDP2 gathers, reduces or moves the parameters."""


def apply(
    model: nn.Module,
    mesh: Mesh,
    config: ParallelConfig,
    *,
    compute_dtype: torch.dtype,
    linear: str = "compute",
    modes: Sequence[Mode] = (),
    compiled: CompileConfig = NOT_COMPILED,
    adapter: AdapterConfig | None = None,
    adapter_dtype: torch.dtype = torch.float32,
    frozen: Collection[str] = (),
) -> ParallelModel:
    """Parallelise a model over the ranks of a mesh, in place; it is on the meta device, and stays there.

    Args:
        compute_dtype: dtype of gathered parameters and activations.
        linear: precision of the blocks' linear layers: "compute", or the name of an 8-bit recipe.
        modes: activation checkpointing mode of each block; empty: none.
        adapter: freezes all parameters, and adds adapters to the blocks' linear layers; None: none.
        adapter_dtype: dtype of the adapters' parameters.
        frozen: names of parameters that do not change; checkpoints have them.
    """
    _keep_part(model, mesh, config)
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    if adapter is not None:
        from penstock.parallel.adapters import add_adapters

        slices = mesh.state["tensor"] if mesh.layout.tensor > 1 else None
        add_adapters(model, adapter, slices, dtype=adapter_dtype)
    if linear != "compute":
        multiply_in_8_bits(model, RECIPES[linear], native=has_native(RECIPES[linear], mesh.state.device_type))
    shares = has_work(mesh.data, offload=config.offload) or _would_cast_often(model, mesh, compute_dtype)
    drops = adapter is not None and adapter.dropout > 0
    compiled = _if_possible(compiled, mesh.state.device_type, RECIPES.get(linear))
    _wrap_blocks(model, modes, compiled, casts_to=None if shares else compute_dtype, drops=drops)
    stages = {0: model}
    if mesh.layout.pipeline > 1:
        from penstock.parallel.pipeline import stages_of

        stages = stages_of(model, mesh.pipeline, per_rank=config.stages_per_rank)
    for stage in stages.values():
        if mesh.layout.tensor > 1:
            from penstock.parallel.vocab_parallel import finish_with_slices

            finish_with_slices(stage, mesh.state["tensor"])
        if shares:
            _shard(stage, mesh, config, compute_dtype)
        else:
            compute_in(stage, compute_dtype, without=cast(nn.ModuleList, stage.layers))
    if mesh.layout.pipeline == 1:
        return ParallelModel([model], None, shares)
    from penstock.parallel.pipeline import Pipeline

    pipeline = Pipeline(stages, mesh.pipeline, slices=mesh.layout.tensor, dtype=compute_dtype)
    model.forward = pipeline.forward  # a plain call, for validation, passes through all stages
    return ParallelModel([*stages.values()], pipeline, shares)


def has_work(mesh: DeviceMesh, *, offload: bool) -> bool:
    """True if FSDP2 has anything to gather, reduce or move; compute_dtype.py casts without it."""
    return mesh.size() > 1 or offload


def import_sharing() -> None:
    """Import what ranks that share parameters need: once, before a process forks them."""
    import torch._dynamo  # noqa: F401 - FSDP2 asks it whether to skip its hooks

    import penstock.parallel.ethernet.scheduler
    import penstock.parallel.sharding.fsdp_waits  # noqa: F401


def _shard(stage: nn.Module, mesh: Mesh, config: ParallelConfig, compute_dtype: torch.dtype) -> None:
    from penstock.parallel.sharding.fsdp import shard

    frozen = {parameter for parameter in stage.parameters() if not parameter.requires_grad}
    shard(
        stage,
        mesh.data,
        compute_dtype=compute_dtype,
        reshard_after_forward=config.reshard_after_forward if mesh.num_shards > 1 else True,
        offload=config.offload,
        leave=frozen if mesh.keeps_frozen_whole else (),
    )


def _would_cast_often(model: nn.Module, mesh: Mesh, compute_dtype: torch.dtype) -> bool:
    """True if several micro-batches of a pipeline would each hold casts of the parameters at a time."""
    return mesh.layout.pipeline > 1 and any(p.dtype != compute_dtype for p in model.parameters())


def _if_possible(compiled: CompileConfig, device_type: str, recipe: Recipe | None = None) -> CompileConfig:
    """Return the setting; off where torch's compiler fails on the device, or on the recipe there."""
    fails = compiled.enabled and not (
        compiles(torch.device(device_type)) and may_compile(recipe, device_type)
    )
    return replace(compiled, enabled=False) if fails else compiled


def _wrap_blocks(
    model: nn.Module,
    modes: Sequence[Mode],
    compiled: CompileConfig,
    *,
    casts_to: torch.dtype | None,
    drops: bool,
) -> None:
    """Recompute and compile the blocks of a model, in place.

    Args:
        casts_to: dtype that they cast their parameters to; None: FSDP2 does.
        drops: adapters drop inputs, by the keys of tokens.
    """

    def with_step() -> None:
        """Give the blocks what their parameters and layers have within a pass only."""
        find_scales_at_once(cast(nn.ModuleList, model.layers))
        if casts_to is not None:
            compute_blocks_in(model, casts_to)
        if drops:
            with_token_keys(model)

    if not compiled.enabled:  # a block that is recomputed must cast again
        with_step()
    if modes:
        recompute(model, modes)
    if compiled.enabled:  # the compiler lets no module change while it is recomputed
        with_step()
    compile_blocks(model, compiled)


def _keep_part(model: nn.Module, mesh: Mesh, config: ParallelConfig) -> None:
    """Keep this rank's stages, slices of matrices and slice of each row of a model, in place."""
    if mesh.layout.pipeline > 1:
        from penstock.parallel.pipeline import keep_stages

        keep_stages(model, mesh.pipeline, per_rank=config.stages_per_rank)
    if mesh.layout.tensor > 1:
        from penstock.parallel.tensor import slice_blocks
        from penstock.parallel.vocab_parallel import slice_vocabulary

        slice_blocks(model, mesh.state["tensor"])
        slice_vocabulary(model, mesh.state["tensor"])
    if mesh.layout.context > 1:
        from penstock.parallel.context import spread_context

        spread_context(model, mesh.context, rule=config.context_rule)


_MAX_PROGRAMS = 64


def compile_blocks(model: nn.Module, config: CompileConfig, *, backend: str = "inductor") -> None:
    """Compile each block at its first call, in place; does nothing unless enabled.

    Args:
        model: its blocks are `model.layers`.
        backend: name of the torch.compile backend.
    """
    if not config.enabled:
        return
    if backend == "inductor":
        set_compiled_programs(
            Path(config.cache) if config.cache else cache_folder() / "compiled", given=bool(config.cache)
        )
    # torch's limit is 8 programs per function; reaching it would end a run whose batches change shape
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_PROGRAMS)
    mode = config.mode if backend == "inductor" else None
    for block in cast(nn.ModuleList, model.layers):
        block.forward = torch.compile(block.forward, backend=backend, mode=mode, fullgraph=True)


def multiply_in_8_bits(model: nn.Module, recipe: Recipe, *, native: bool) -> None:
    """Use an 8-bit recipe in the linear layers of the blocks, in place; also in tensor-parallel ones.

    Args:
        native: the devices have the instructions; layers that are too small to gain by them are left as they
            are (`Recipe.pays`). Where products are emulated, no layer is.
    """
    for module in model.get_submodule("layers").modules():
        if native and isinstance(module, nn.Linear) and not recipe.pays(*local(module.weight).shape):
            continue
        if type(module) is nn.Linear:
            module.__class__ = Float8TrainingLinear
        if isinstance(module, Float8TrainingLinear) or _is_sliced(module):
            module.multiply = Multiply(recipe, native)  # type: ignore[assignment]  # not a module or tensor


def _is_sliced(module: nn.Module) -> bool:
    """True for the linear layers of parallel/tensor.py, which is loaded only where they are used."""
    return isinstance(module, nn.Linear) and hasattr(module, "group") and hasattr(module, "multiply")
