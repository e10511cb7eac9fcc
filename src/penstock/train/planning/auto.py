"""`plan = "auto"`: plans the keys that a recipe leaves open, on rank 0 for all ranks.

A run keeps its plan when it resumes, as long as its ranks and batch divide that way: the plan is in the
resolved recipe in the run's folder. Otherwise, and with `plan = "again"`, it is planned again. With
`parallel.replicate = -1` the number of replicas is not part of the plan.

All machines are assumed to equal that of rank 0.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.core import env
from penstock.core.config import Raw
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.log import EventLog
from penstock.core.network.nics import usable
from penstock.core.network.probe import probe_nics
from penstock.devices import accelerator
from penstock.devices.figures import DEVICES, Device, device_named
from penstock.obs.metric_names import RECIPE_FILE
from penstock.obs.peak import peak_flops
from penstock.parallel.layout import layout_of
from penstock.parallel.mesh import World, broadcast
from penstock.plan.hardware import Cluster, cluster_of
from penstock.plan.job import Compute
from penstock.plan.recipe_sections import Sections, sections_of, with_plan
from penstock.plan.report import described
from penstock.plan.search import search
from penstock.train.planning.question import in_numbers, question_of
from penstock.train.recipe.config import TrainConfig
from penstock.train.recipe.planned_changes import check_rows
from penstock.train.resolve.load import build_recipe

logger = EventLog(__name__)

_ON_MACHINES_FOUND = ("auto", "again")
_CHOSEN = {
    "parallel": ("shard", "replicate", "tensor", "context", "context_rule", "pipeline", "stages_per_rank"),
    "recompute": ("policy", "budget"),
    "ethernet": ("window_mib", "keep_mib", "schedule", "gather", "reduce"),
    "data": ("micro_batch_size",),
}
"""Keys that a plan may set, by section."""


def plan_on_ranks(raw: Raw, config: TrainConfig, world: World) -> TrainConfig:
    """Return the recipe with its planned values, equal on all ranks; every rank must call it.

    Args:
        raw: the recipe's own values, without derived ones.

    Raises:
        ConfigError: nothing fits, or the planner does not know the machines.
    """
    answer: dict[str, Any] = {}
    if world.is_first:
        try:
            answer = {"recipe": planned(raw, config, world_size=world.ranks.world_size)}
        except PenstockError as error:  # sent on, because the other ranks wait for an answer
            answer = {"error": str(error)}
    answer = broadcast(world, answer)
    if "error" in answer:
        raise ConfigError(answer["error"])
    return build_recipe(answer["recipe"])


def planned(raw: Raw, config: TrainConfig, *, world_size: int) -> Raw:
    """Return a recipe's values, with planned values for the keys that it leaves open.

    Raises:
        ConfigError: as in `plan_on_ranks`.
    """
    raw = in_numbers(raw, config, world_size=world_size, ranks_per_machine=ranks_of_machine(world_size))
    chosen = None if config.plan == "again" else _chosen_before(raw, config, world_size=world_size)
    if chosen is None:
        chosen = _planned_now(raw, config, world_size=world_size)
    return with_plan(raw, chosen)


def _planned_now(raw: Raw, config: TrainConfig, *, world_size: int) -> Sections:
    cluster = _cluster(config, world_size=world_size)
    found = search(question_of(build_recipe(raw), raw), cluster)
    best = found.best
    logger.info(
        "planned",
        "Of {plans:,} plans for {cluster} the best is {plan}: {tokens_per_s:,.0f} tokens/s a "
        "device (within {band:.0%}), {memory_bytes:bytes} each",
        plans=found.tried,
        cluster=f"{cluster.nodes} x {cluster.devices_per_node} {cluster.device.name}",
        plan=described(best),
        tokens_per_s=best.speed,
        band=best.prediction.band,
        memory_bytes=round(best.memory.total),
    )
    return sections_of(best.job)


def _cluster(config: TrainConfig, *, world_size: int) -> Cluster:
    if config.plan in _ON_MACHINES_FOUND:
        return machines_of(world_size=world_size, compute=config.compute)
    cluster = cluster_of(config.plan)
    if cluster.num_devices != world_size:
        raise ConfigError(
            f"The cluster of the plan has {cluster.num_devices} devices, and the run {world_size} ranks",
            got=config.plan,
            fix="Change its nodes or devices_per_node, or set plan = 'auto'.",
        )
    return cluster


def _chosen_before(raw: Raw, config: TrainConfig, *, world_size: int) -> Sections | None:
    """Return the plan from the start of the run, if it is still valid; None: it is not."""
    file = Path(config.run.dir) / RECIPE_FILE
    if not file.is_file():
        return None
    before = json.loads(file.read_text())
    if not before.get("plan"):
        return None
    kept = {
        name: {key: before[name][key] for key in keys if before.get(name, {}).get(key) is not None}
        for name, keys in _CHOSEN.items()
    }
    if kept["recompute"].get("policy") != "budget":
        kept["recompute"].pop("budget", None)
    if not _is_possible(with_plan(raw, kept), world_size=world_size):
        return None
    logger.info("planned_before", "Planned as before, in {path}", path=file)
    return kept


def _is_possible(raw: Raw, *, world_size: int) -> bool:
    """True if a recipe's layout and batches divide over `world_size` ranks."""
    try:
        recipe = build_recipe(raw)
        check_rows(recipe, world_size=layout_of(recipe.parallel, world_size=world_size).num_data)
    except ConfigError:
        return False
    return True


_GIB, _TERA = 2**30, 1e12
_ASSUMED_MBIT_S = 10_000
"""Assumed speed of a network card that does not report one, as in virtual machines."""


def machines_of(*, world_size: int, compute: Compute) -> Cluster:
    """Return the cluster of the present machines.

    Raises:
        ConfigError: the planner has no data sheet of its GPUs.
    """
    here = ranks_of_machine(world_size)
    nics = usable(probe_nics())
    speeds = [nic.speed_mbit_s for nic in nics if nic.has_true_speed and nic.speed_mbit_s]
    return Cluster(
        name="the machines of this run",
        nodes=world_size // here,
        devices_per_node=here,
        device=_gpu() if accelerator.is_available() else _cpu(ranks=here, compute=compute),
        nics=max(1, len(nics)),
        nic_gbit_s=min(speeds, default=_ASSUMED_MBIT_S) / 1000,
    )


def ranks_of_machine(world_size: int) -> int:
    """Return the number of ranks per machine."""
    here = env.local_world_size() if env.ranks().world_size > 1 else world_size
    return here if world_size % here == 0 else 1


def known_device(name: str, *, memory_gib: float) -> Device:
    """Return the planner's data sheet of a GPU, with the given memory.

    Args:
        name: device name, as the driver reports it.

    Raises:
        ConfigError: the planner has no data sheet of it.
    """
    known = device_named(name, memory_gib=memory_gib)
    if known is None:
        raise ConfigError(
            "The planner has no data sheet of this GPU",
            got=f"{name}, {memory_gib:.0f} GiB",
            fix="Describe it under [device] in a cluster.toml, and set plan to the file's path.",
        )
    return replace(known, memory_gib=memory_gib)


def _gpu() -> Device:
    device = accelerator.choose(env.ranks().local_rank)
    _, total = accelerator.free_and_total_bytes(device)
    return known_device(accelerator.name_of(device), memory_gib=total / _GIB)


def _cpu(*, ranks: int, compute: Compute) -> Device:
    """Return one rank's share of this machine; its FLOP/s are measured, in well under a second."""
    tflops = peak_flops(torch.device("cpu"), getattr(torch, compute)) / _TERA
    share = env.memory_bytes() / ranks / _GIB
    return replace(DEVICES["CPU"], memory_gib=share, float32_tflops=tflops, bfloat16_tflops=tflops)
