"""A plan as sections of a recipe, and what a recipe's author has decided already; pure."""

from collections.abc import Mapping
from typing import Any

from penstock.parallel.layout import REST
from penstock.plan.job import Job

Sections = dict[str, Any]
"""Of a recipe: names to tables or values."""

_POLICY = {"keep": "none", "operators": "operators", "full": "full"}
_AXES = ("shard", "replicate", "tensor", "context", "pipeline", "stages_per_rank")
_OF_ETHERNET = ("window_mib", "keep_mib", "operations", "gather", "reduce", "feedback")
_NEUTRAL = (0, "compute", "float32")


def sections_of(job: Job) -> Sections:
    """Return what a plan says, as sections of a recipe; of defaults only those of the layout."""
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


def _recompute(job: Job) -> Sections:
    """Return the policy of a job's blocks: one for all, or the bytes that those of a mixture keep."""
    if len(set(job.block_modes)) == 1:
        return {"policy": _POLICY[job.block_modes[0]]}
    kept = job.kept_by_mode
    return {"policy": "budget", "budget": str(sum(kept[mode] for mode in job.block_modes))}


def with_plan(raw: Mapping[str, Any], planned: Sections) -> Sections:
    """Return a recipe's values with a plan's where the recipe says nothing, or `shard = -1`: the rest.

    `replicate = -1` stays: such a run takes up as many copies as there are.

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
    """Return the knobs that a recipe's author has set, as `Question.decided` has them.

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
