"""Plan as sections of a recipe, and the settings that a recipe decides already. Pure functions."""

from collections.abc import Mapping
from typing import Any

from penstock.parallel.layout import REST
from penstock.plan.job import TrainingStep

Sections = dict[str, Any]
"""Sections of a recipe: names to tables or values."""

_POLICY = {"keep": "none", "operators": "operators", "full": "full"}
_AXES = ("shard", "replicate", "tensor", "context", "pipeline", "stages_per_rank")
_OF_ETHERNET = ("window_mib", "keep_mib", "schedule", "operations", "gather", "reduce", "feedback")
_NEUTRAL = (0, "compute", "float32", "depth_first")


def sections_of(job: TrainingStep) -> Sections:
    """Return a plan as sections of a recipe; defaults are left out except those of the layout."""
    layout = job.layout
    parallel = {axis: getattr(layout, axis) for axis in _AXES if axis != "stages_per_rank"}
    if job.stages_per_rank > 1:
        parallel["stages_per_rank"] = job.stages_per_rank
    if layout.context > 1:
        parallel["context_rule"] = job.context_rule
    sections: Sections = {
        "parallel": parallel,
        "recompute": _recompute(job),
        "data": {"micro_batch_size": job.micro_batch_size},
    }
    ethernet = {name: getattr(job, name) for name in _OF_ETHERNET if getattr(job, name) not in _NEUTRAL}
    return {**sections, "ethernet": ethernet} if ethernet else sections


def _recompute(job: TrainingStep) -> Sections:
    """Return the activation-checkpointing policy of a job's blocks: one for all, or a byte budget."""
    if len(set(job.block_modes)) == 1:
        return {"policy": _POLICY[job.block_modes[0]]}
    modes = zip(job.model.layers, job.block_modes, strict=True)
    kept = sum(job.kept_by_mode(kind)[mode] for kind, mode in modes)
    return {"policy": "budget", "budget": str(job.batches_per_pass * kept)}


def with_plan(raw: Mapping[str, Any], planned: Sections) -> Sections:
    """Return a recipe's values, completed by a plan's where the recipe has none or `shard = -1`.

    `replicate = -1` stays: such a run uses as many replicas as the ranks allow.


    >>> with_plan({"parallel": {"tensor": 2}}, {"parallel": {"tensor": 2, "shard": 4}})
    {'parallel': {'tensor': 2, 'shard': 4}}
    """
    joined: Sections = dict(raw)
    for name, section in planned.items():
        said = raw.get(name, {})
        joined[name] = {**section, **{key: value for key, value in said.items() if not _is_open(key, value)}}
    return joined


def _is_open(key: str, value: object) -> bool:
    return key == "shard" and value == REST


def decided(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a recipe decides, as for `Question.decided`.

    >>> decided({"parallel": {"tensor": 2}, "recompute": {"policy": "none"}, "data": {}})
    {'tensor': 2, 'modes': 'keep'}
    """
    found: dict[str, Any] = {}
    parallel, ethernet = raw.get("parallel", {}), raw.get("ethernet", {})
    for name in (*_AXES, "reshard_after_forward"):
        if name in parallel:
            found[name] = parallel[name]
    policy = raw.get("recompute", {}).get("policy")
    known = {value: mode for mode, value in _POLICY.items()}
    if policy in known:
        found["modes"] = known[policy]
    for name in _OF_ETHERNET:
        if name in ethernet:
            found[name] = ethernet[name]
    if "micro_batch_size" in raw.get("data", {}):
        found["micro_batch_size"] = raw["data"]["micro_batch_size"]
    return found
