"""Capacity of a machine: the memory that a run will take is held against what is there; no torch.

Ranks on processors share the machine's memory, or that of its control group. Beside what the planner counts
(memory.py) it holds the copies of checkpoints in progress and the batches that are fetched ahead. Ranks on
accelerators have a device each, and the machine holds those copies, and what is offloaded.
"""

from dataclasses import dataclass
from pathlib import Path

from penstock.core import env
from penstock.core.errors import ConfigError
from penstock.core.log import EventLog
from penstock.core.units import mib
from penstock.parallel.layout import layout_of
from penstock.train.planning.memory import memory_plan
from penstock.train.recipe.config import TrainConfig, on_machines
from penstock.train.recipe.planned_changes import check_rows

log = EventLog(__name__)

REFUSED_ABOVE, WARNED_ABOVE = 1.3, 0.9
"""Shares of the memory that is there. The planner's error is below a quarter (benchmarks/plan_memory.py)."""
_BATCH_BYTES_PER_TOKEN = 3 * 8
"""Token ids, labels and positions in int64."""
_DEVICE_FILES = ("dev/nvidia[0-9]*", "dev/kfd", "dev/accel/accel*", "dev/accel[0-9]*", "dev/dri/renderD*")
_HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """Bytes that a run takes on one machine."""

    host: int
    """Bytes of the machine's memory, for all its ranks together."""
    device: int
    """Bytes of one rank's accelerator; 0: ranks run on processors."""


def may_have_accelerators(root: Path = Path("/")) -> bool:
    """Return False if this machine has surely no accelerator for this process; torch is not asked.

    Args:
        root: of the file system, for tests.
    """
    if env.variable(_HIDDEN[0]) == "" and env.has_variable(_HIDDEN[0]):
        return False
    return any(next(root.glob(pattern), None) is not None for pattern in _DEVICE_FILES)


def memory_of(config: TrainConfig, *, world_size: int, here: int, on_cpu: bool) -> RunMemory:
    """Return what a run takes on a machine.

    Args:
        world_size: ranks of the run.
        here: those on this machine.
        on_cpu: True if they compute on processors.

    Raises:
        ConfigError: the recipe cannot run on that many ranks.
    """
    config = on_machines(config, world_size=world_size, ranks_per_machine=here)
    layout = layout_of(config.parallel, world_size=world_size)
    rows = check_rows(config, world_size=layout.num_data)
    memory = memory_plan(config, layout, on_cpu=on_cpu)
    # a copy of what a checkpoint holds, of which replicas write a share each; of adapters it is little
    is_little = config.adapter is not None and not config.adapter.saved
    saved = 0 if is_little else (memory.weights + memory.optimizer) // layout.replicate
    batches = (2 + config.data.prefetch) * rows * config.data.longest * _BATCH_BYTES_PER_TOKEN
    host, device = saved + batches, 0
    if on_cpu:
        host += memory.total
    elif config.parallel.offload:
        away = memory.weights + memory.optimizer + memory.gradients
        host, device = host + away, memory.total - away
    else:
        device = memory.total
    return RunMemory(host=here * host, device=device)


def check_host(needed: RunMemory, *, here: int, oversubscribe: bool) -> None:
    """Hold what a run takes of this machine's memory against what there is.

    Raises:
        ConfigError: more than 1.3 times as much, unless `oversubscribe`.
    """
    ranks = f"{here} processes" if here > 1 else "the process"
    _check(
        needed.host,
        env.memory_bytes(),
        what=f"of memory on this machine, for {ranks}",
        oversubscribe=oversubscribe,
    )


def check_device(needed: RunMemory, total: int, *, name: str, oversubscribe: bool) -> None:
    """Hold what a rank takes of its accelerator against what there is.

    Args:
        total: bytes of the accelerator.
        name: of the accelerator.

    Raises:
        ConfigError: more than 1.3 times as much, unless `oversubscribe`.
    """
    _check(needed.device, total, what=f"on each {name}", oversubscribe=oversubscribe)


def _check(needed: int, there: int, *, what: str, oversubscribe: bool) -> None:
    if needed <= WARNED_ABOVE * there:
        return
    if needed <= REFUSED_ABOVE * there or oversubscribe:
        log.warning(
            "memory_tight",
            "The run needs {needed_bytes:bytes} {place}, and there are {there_bytes:bytes}",
            needed_bytes=needed,
            place=what,
            there_bytes=there,
        )
        return
    raise ConfigError(
        f"The run needs {mib(needed)} {what}, and there are {mib(there)}",
        fix="Lower data.micro_batch_size or data.sequence_length, set recompute.policy, choose a smaller "
        "model, or shard over more machines; --dry-run shows what takes it. --oversubscribe starts it.",
    )
