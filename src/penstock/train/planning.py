"""`plan = "auto"`: what a recipe leaves open is planned for the machines of the run, by rank 0 for all.

What a run chose stays when it goes on, as long as its ranks and its batch can be shared that way: the choice
is in the recipe that the run's folder holds. Else, and with `plan = "again"`, it is planned anew. With
`parallel.replicate = -1` the number of copies is no part of the choice.
"""

import json
import logging
from pathlib import Path
from typing import Any

from penstock.core.config import Raw
from penstock.core.errors import ConfigError, PenstockError
from penstock.obs.names import RECIPE_FILE
from penstock.parallel.layout import layout_of
from penstock.parallel.mesh import World
from penstock.plan.hardware import Cluster
from penstock.plan.report import described
from penstock.plan.search import search
from penstock.plan.sections import Sections, sections_of, with_plan
from penstock.plan.shipped import cluster_of
from penstock.train.config import TrainConfig
from penstock.train.control import share
from penstock.train.derived import check_rows
from penstock.train.machines import machines_of, ranks_of_machine
from penstock.train.plan_question import in_numbers, question_of
from penstock.train.recipe import build_recipe

logger = logging.getLogger(__name__)

_ON_MACHINES_FOUND = ("auto", "again")
_CHOSEN = {
    "parallel": ("shard", "replicate", "tensor", "context", "context_rule", "pipeline", "stages_per_rank"),
    "recompute": ("policy", "budget"),
    "ethernet": ("window_mib", "keep_mib", "gather", "reduce"),
    "data": ("micro_batch_size",),
}
"""What a plan may say, by section."""


def plan_on_ranks(raw: Raw, config: TrainConfig, world: World) -> TrainConfig:
    """Return the recipe of a run with what its plan says; the same on all ranks, each of which must call it.

    Args:
        raw: the recipe's values, without what follows from others.

    Raises:
        ConfigError: nothing fits, or the machines are not known to the planner.
    """
    answer: dict[str, Any] = {}
    if world.is_first:
        try:
            answer = {"recipe": planned(raw, config, world_size=world.ranks.world_size)}
        except PenstockError as error:  # the others wait for an answer
            answer = {"error": str(error)}
    answer = share(world, answer)
    if "error" in answer:
        raise ConfigError(answer["error"])
    return build_recipe(answer["recipe"])


def planned(raw: Raw, config: TrainConfig, *, world_size: int) -> Raw:
    """Return a recipe's values with those of a plan where it leaves them open.

    Raises:
        ConfigError: as `plan_on_ranks`.
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
        "planned %r on=%r plans=%d tokens_s_device=%.4g band=%.2g memory_gib=%.3g",
        described(best),
        f"{cluster.nodes} x {cluster.devices_per_node} {cluster.device.name}",
        found.tried,
        best.speed,
        best.prediction.band,
        best.memory.total / 2**30,
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
    """Return what the run chose when it began, if it can stay."""
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
    logger.info("planned as before: %s", file)
    return kept


def _is_possible(raw: Raw, *, world_size: int) -> bool:
    """Whether a recipe's layout and batches divide over so many ranks."""
    try:
        recipe = build_recipe(raw)
        check_rows(recipe, world_size=layout_of(recipe.parallel, world_size=world_size).num_data)
    except ConfigError:
        return False
    return True
