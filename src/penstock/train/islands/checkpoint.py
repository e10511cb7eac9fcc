"""Checkpoints of islands, and resuming them with another number of islands.

        model.NAME                          the outer parameters: the model of the run
        outer.momentum.NAME                 momentum of the outer optimizer
        outer.moved.NAME                    exchanges in progress
        island-00002.model.NAME             an island's own parameters, between two outer steps
        island-00002.optimizer.NAME.KEY     and its optimizer state

So a run also resumes bit-identically between two outer steps. Another number of islands first syncs, unless
the islands just have: the saved islands' changes are averaged as in an outer step, so nothing they learned is
lost. Island k gets the optimizer state of saved island k modulo their number; a run without islands gets that
of the first.
"""

from collections.abc import Collection, Mapping
from typing import Final

import torch
from torch import Tensor

from penstock.checkpoint.find import SavedCheckpoint
from penstock.checkpoint.layout import MODEL
from penstock.checkpoint.load import load_into
from penstock.nn.dtensor import detached_local
from penstock.parallel.slices import like
from penstock.train.islands.outer_optimizer import Outer, split_like
from penstock.train.islands.schedule import fragment_of, in_flight
from penstock.train.recipe.outer_config import OuterConfig

_MOVED: Final = "outer.moved."


def island_tensors(outer: Outer, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's tensors of a run with islands; live tensors, except `outer.moved`.

    Args:
        own: training tensors of this rank's island.
    """
    found = {**_prefixed(own, outer.island), **_shared(outer)}
    for fragment, named in enumerate(outer.fragments):
        if (moved := outer.mean_moved(fragment)) is not None:
            for (name, parameter), flat in zip(named, split_like(moved, named), strict=True):
                here = flat.view_as(detached_local(outer.values[name]))
                found[f"{_MOVED}{name}"] = like(parameter, here, tuple(parameter.shape))
    return found


def load_islands(saved: SavedCheckpoint, outer: Outer, own: Mapping[str, Tensor]) -> None:
    """Load the outer state and the training tensors of this rank's island from a checkpoint.

    Args:
        own: training tensors of this rank's island.
    """
    index = saved.index()
    islands, has_met = index.meta.outer.get("islands", 0), index.meta.outer.get("has_met", True)
    outer.begin_anew()
    if not islands:
        load_into(saved, own)
        outer.begin_anew()
        return
    load_into(saved, {name: t for name, t in _shared(outer).items() if name in index.tensors})
    mine = outer.island % islands
    if islands != outer.num_islands and not has_met:
        _meet_first(saved, outer, own, islands=islands, step=index.meta.step, moments_of=mine)
    else:
        load_into(saved, _prefixed(own, mine))
        _load_moved(saved, outer, step=index.meta.step)
    outer.has_met = has_met or islands != outer.num_islands


def load_as_one(saved: SavedCheckpoint, outer: Outer, own: Mapping[str, Tensor]) -> None:
    """Load the training tensors of a run without islands from a checkpoint with islands, averaging them.

    Args:
        outer: outer optimizer of this run's model, for the last outer step.
        own: training tensors of this rank.
    """
    index = saved.index()
    load_into(saved, {name: t for name, t in _shared(outer).items() if name in index.tensors})
    if index.meta.outer["has_met"]:
        load_into(saved, _prefixed(own, 0))
    else:
        islands = index.meta.outer["islands"]
        _meet_first(saved, outer, own, islands=islands, step=index.meta.step, moments_of=0)


@torch.no_grad()
def _meet_first(
    saved: SavedCheckpoint,
    outer: Outer,
    own: Mapping[str, Tensor],
    *,
    islands: int,
    step: int,
    moments_of: int,
) -> None:
    """Take an outer step with the mean change of all saved islands, summed in the same order on all ranks."""
    sums = [torch.zeros_like(outer.moved(fragment)) for fragment in range(len(outer.fragments))]
    for island in range(islands):
        load_into(saved, _prefixed(own, island))
        for fragment, total in enumerate(sums):
            total.add_(outer.moved(fragment), alpha=1 / islands)
    load_into(saved, _prefixed(own, moments_of))
    for fragment, moved in enumerate(sums):
        outer.meet(fragment, moved, step=step)


def _load_moved(saved: SavedCheckpoint, outer: Outer, *, step: int) -> None:
    """Restore exchanges in progress."""
    outer.in_progress = in_progress(saved.index().tensors, outer.config, step=step)
    for fragment in outer.in_progress:
        parts = {
            f"{_MOVED}{name}": like(p, torch.empty_like(detached_local(outer.values[name])), tuple(p.shape))
            for name, p in outer.fragments[fragment]
        }
        if parts:
            load_into(saved, parts)
            outer.arrived[fragment] = torch.cat([detached_local(part).flatten() for part in parts.values()])


def in_progress(names: Collection[str], config: OuterConfig, *, step: int) -> set[int]:
    """Return the fragments whose exchange was in progress, is complete in the checkpoint, and continues.

    Args:
        names: names of all tensors in the checkpoint; `config` may differ from its.

    >>> names = [f"{kind}layers.{block}.w" for kind in ("model.", "outer.moved.") for block in (0, 1)]
    >>> config = OuterConfig(every=4, fragments=2, overlap=1)
    >>> in_progress(names, config, step=2), in_progress(names[:3], config, step=4)
    ({0}, set())
    """
    of_model = [name.removeprefix(MODEL) for name in names if name.startswith(MODEL)]
    return {
        fragment
        for fragment in in_flight(config, step)
        if all(
            f"{_MOVED}{name}" in names for name in of_model if fragment_of(name, config.fragments) == fragment
        )
    }


def _shared(outer: Outer) -> dict[str, Tensor]:
    return {
        **{f"{MODEL}{name}": value for name, value in outer.values.items()},
        **{f"outer.momentum.{name}": value for name, value in outer.momenta.items()},
    }


def _prefixed(own: Mapping[str, Tensor], island: int) -> dict[str, Tensor]:
    return {f"island-{island:05d}.{name}": tensor for name, tensor in own.items()}
