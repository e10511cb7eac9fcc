"""Kernels of a run: chosen by rank 0 for all ranks, recorded in each checkpoint, and used again on resume."""

from contextlib import suppress
from pathlib import Path

import torch

from penstock.checkpoint.resume import agreed
from penstock.core import config as configs
from penstock.core.errors import CheckpointDamaged, ConfigError
from penstock.devices import accelerator
from penstock.devices.kernel_choice import choose, identity_of
from penstock.devices.kernel_table import AUTO, REFERENCE, KernelTable, kept
from penstock.devices.kernel_trial import Operation
from penstock.nn.kernels.trials import Heads, attention_operations
from penstock.nn.kernels.trials import Rows as AttentionRows
from penstock.parallel.layout import RankLayout
from penstock.parallel.mesh import World, broadcast
from penstock.train.data_setup import checkpoints
from penstock.train.recipe.config import TrainConfig
from penstock.train.recipe.planned_changes import check_rows

Changes = dict[str, tuple[str, str]]
"""Operation -> (kernel before, kernel now)."""


def choose_kernels(
    config: TrainConfig, world: World, layout: RankLayout
) -> tuple[KernelTable, KernelTable | None]:
    """Return the kernels of this start, equal on all ranks, and those of the checkpoint that it resumes from.

    Raises:
        PenstockError: as `kernel_choice.choose`, on every rank.
    """
    found: tuple[KernelTable, KernelTable | None] = KernelTable(), None

    def choose_here() -> None:
        nonlocal found
        if world.is_first:
            recorded = recorded_kernels(config)
            operations = operations_of(config, layout, world.device)
            found = choose(operations, world.device, setting=config.kernels, recorded=recorded), recorded

    if (failure := agreed(choose_here)) is not None:
        raise failure
    sent = broadcast(world, [None if table is None else configs.dump(table) for table in found])
    chosen, recorded = (None if raw is None else configs.build(KernelTable, raw) for raw in sent)
    assert chosen is not None
    return chosen, recorded


def operations_of(
    config: TrainConfig, layout: RankLayout, device: torch.device
) -> list[Operation[AttentionRows]]:
    """Return the operations of a rank that have several kernels.

    Under context parallelism by all-gather, attention has one kernel: a dense mask.
    """
    is_exchanged = config.parallel.context_rule == "ulysses"
    if layout.context > 1 and not is_exchanged:
        return []
    ranks = layout.tensor * (layout.context if is_exchanged else 1)
    model = config.model
    sizes = Heads(
        heads=max(1, model.num_attention_heads // ranks),
        kv_heads=max(1, model.key_value_heads // ranks),
        head_dim=model.size_of_head,
        dtype=getattr(torch, config.compute),
        device=device,
    )
    rows = check_rows(config, world_size=layout.num_data)
    return attention_operations(
        sizes, rows=rows, length=config.data.sequence_length, windows=set(model.windows)
    )


def recorded_kernels(config: TrainConfig) -> KernelTable | None:
    """Return the kernels of the newest checkpoint with an intact index; None: there are none."""
    for saved in reversed(checkpoints(config)):
        with suppress(CheckpointDamaged):
            raw = saved.index().meta.kernels
            try:
                return configs.build(KernelTable, raw) if raw else None
            except ConfigError:  # of a newer version
                return None
    return None


def shown_kernels(config: TrainConfig, layout: RankLayout, device: torch.device) -> dict[str, str]:
    """Return the kernel of each operation in words, without measuring: as a start would choose it.

    Raises:
        UsageError, ConfigError: `kernels` names a file that holds no table.
    """
    recorded = recorded_kernels(config)
    pinned = None if config.kernels in (AUTO, REFERENCE) else KernelTable.read(Path(config.kernels))
    is_measured = config.kernels == AUTO and accelerator.is_accelerator(device)
    known = kept(*identity_of(device)) if is_measured else pinned or KernelTable()
    found = {}
    for operation in operations_of(config, layout, device):
        row = known.rows.get(operation.key)
        if recorded is not None and recorded.setting == config.kernels:
            row = recorded.of(operation.name) or row
        elif pinned is not None:
            row = row or pinned.of(operation.name)
        unknown = (
            "not chosen yet on this device" if is_measured else f"{operation.candidates[0].name} (the first)"
        )
        found[operation.name] = unknown if row is None else str(row)
    return found


def changes_of(before: KernelTable | None, now: KernelTable) -> Changes:
    """Return the operations whose kernel is another one than before.

    >>> from penstock.devices.kernel_table import ChosenKernel
    >>> before = KernelTable(rows={"attention.rows 1 x 9": ChosenKernel(kernel="SDPA by cuDNN")})
    >>> changes_of(before, KernelTable(rows={"attention.rows 2 x 9": ChosenKernel(kernel="SDPA")}))
    {'attention.rows': ('SDPA by cuDNN', 'SDPA')}
    """
    old = {} if before is None else before.chosen
    return {
        name: (old[name], kernel) for name, kernel in now.chosen.items() if old.get(name, kernel) != kernel
    }
