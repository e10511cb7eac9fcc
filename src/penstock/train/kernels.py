"""Kernels of a run: chosen by rank 0 for all ranks, recorded in each checkpoint, and used again on resume."""

import torch

from penstock.checkpoint.find import newest_meta
from penstock.checkpoint.resume import agreed
from penstock.core import config as configs
from penstock.core.errors import ConfigError
from penstock.devices.kernel_choice import Operation, choose, is_measured, stored
from penstock.devices.kernel_table import KernelTable
from penstock.nn.kernels.trials import Heads, attention_operations
from penstock.nn.kernels.trials import Rows as AttentionRows
from penstock.parallel.layout import RankLayout
from penstock.parallel.mesh import World, broadcast
from penstock.train.data_setup import checkpoints
from penstock.train.recipe.config import TrainConfig
from penstock.train.recipe.planned_changes import check_rows

Changes = dict[str, tuple[str, str]]
"""Operation -> (kernel before, kernel now)."""


def choose_kernels(config: TrainConfig, world: World, layout: RankLayout) -> tuple[KernelTable, KernelTable]:
    """Return the kernels of this start, equal on all ranks, and those of the checkpoint that it resumes from.

    Raises:
        PenstockError: as `kernel_choice.choose`, on every rank.
    """
    found: list[KernelTable] = []

    def choose_here() -> None:
        if world.is_first:
            recorded, operations = recorded_kernels(config), operations_of(config, layout, world.device)
            found[:] = choose(operations, world.device, setting=config.kernels, recorded=recorded), recorded

    if (failure := agreed(choose_here)) is not None:
        raise failure
    chosen, recorded = broadcast(world, [configs.dump(table) for table in found])
    return configs.build(KernelTable, chosen), configs.build(KernelTable, recorded)


def operations_of(
    config: TrainConfig, layout: RankLayout, device: torch.device
) -> list[Operation[AttentionRows]]:
    """Return the operations of a rank that have several kernels.

    Under context parallelism by all-gather, attention has one kernel: a dense mask. With a softcap it has one
    too.
    """
    if config.model.attn_logit_softcapping is not None:
        return []
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
        has_sinks=model.family.has_sinks,
    )
    rows = check_rows(config, world_size=layout.num_data)
    return attention_operations(
        sizes, rows=rows, length=config.data.sequence_length, windows=set(model.windows)
    )


def recorded_kernels(config: TrainConfig) -> KernelTable:
    """Return the kernels of the newest checkpoint with an intact index; empty: there are none."""
    meta = newest_meta(checkpoints(config))
    try:
        return KernelTable() if meta is None else configs.build(KernelTable, meta.kernels)
    except ConfigError:  # of a newer version
        return KernelTable()


def shown_kernels(config: TrainConfig, layout: RankLayout, device: torch.device) -> dict[str, str]:
    """Return the kernel of each operation in words, without measuring: as a start would choose it.

    Raises:
        UsageError, ConfigError: `kernels` names a file that holds no table.
    """
    operations = operations_of(config, layout, device)
    recorded, table = recorded_kernels(config).chosen_by(config.kernels), stored(config.kernels, device)
    is_new = is_measured(config.kernels, device)
    found = {}
    for one in operations:
        row = recorded.row_for(one.key) or (table.rows.get(one.key) if is_new else table.row_for(one.key))
        unknown = "not chosen yet on this device" if is_new else f"{one.first} (the first)"
        found[one.name] = str(row or unknown)
    return found


def changes_of(before: KernelTable, now: KernelTable) -> Changes:
    """Return the operations whose kernel is another one than before.

    >>> from penstock.devices.kernel_table import ChosenKernel
    >>> before = KernelTable(rows={"attention.rows 1 x 9": ChosenKernel(kernel="SDPA by cuDNN")})
    >>> changes_of(before, KernelTable(rows={"attention.rows 2 x 9": ChosenKernel(kernel="SDPA")}))
    {'attention.rows': ('SDPA by cuDNN', 'SDPA')}
    """
    old = before.chosen
    return {
        name: (old[name], kernel) for name, kernel in now.chosen.items() if old.get(name, kernel) != kernel
    }
