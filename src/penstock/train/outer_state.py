"""What a checkpoint of islands holds, and how another number of islands goes on from it.

    model.NAME                          the outer parameters: the model of the run
    outer.momentum.NAME                 of the outer optimizer
    outer.moved.NAME                    of exchanges that were under way
    island-00002.model.NAME             an island's own parameters, between two meetings
    island-00002.optimizer.NAME.KEY     and its moments

So a run resumes to the same bits between two outer steps, too. On another number of islands, they first meet
unless they just had: what the saved islands moved by is averaged as at an outer step, so nothing they learned
is lost. The moments of island k are those of saved island k modulo their number; a run without islands goes
on with those of the first.
"""

from collections.abc import Collection, Mapping
from typing import Final

import torch
from torch import Tensor

from penstock.checkpoint.find import Saved
from penstock.checkpoint.load import load_into
from penstock.checkpoint.tensors import MODEL
from penstock.train.optim.shards import like, local
from penstock.train.outer import Outer, split_like
from penstock.train.outer_config import OuterConfig
from penstock.train.outer_schedule import fragment_of, in_flight

_MOVED: Final = "outer.moved."


def island_tensors(outer: Outer, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a run with islands that this rank holds; the live ones, but for `outer.moved`.

    Args:
        own: the training tensors of this rank's island.
    """
    found = {**_prefixed(own, outer.island), **_shared(outer)}
    for fragment, named in enumerate(outer.fragments):
        if (moved := outer.mean_moved(fragment)) is not None:
            for (name, parameter), flat in zip(named, split_like(moved, named), strict=True):
                here = flat.view_as(local(outer.values[name]))
                found[f"{_MOVED}{name}"] = like(parameter, here, tuple(parameter.shape))
    return found


def load_islands(saved: Saved, outer: Outer, own: Mapping[str, Tensor]) -> None:
    """Fill the outer state and the training tensors of this rank's island from a checkpoint.

    Args:
        own: the training tensors of this rank's island.
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


def load_as_one(saved: Saved, outer: Outer, own: Mapping[str, Tensor]) -> None:
    """Fill the training tensors of a run without islands from a checkpoint of some: they meet for good.

    Args:
        outer: of this run's model, to meet by.
        own: the training tensors of this rank.
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
    saved: Saved, outer: Outer, own: Mapping[str, Tensor], *, islands: int, step: int, moments_of: int
) -> None:
    """Take an outer step with what all saved islands moved by, summed in one order on all ranks."""
    sums = [torch.zeros_like(outer.moved(fragment)) for fragment in range(len(outer.fragments))]
    for island in range(islands):
        load_into(saved, _prefixed(own, island))
        for fragment, total in enumerate(sums):
            total.add_(outer.moved(fragment), alpha=1 / islands)
    load_into(saved, _prefixed(own, moments_of))
    for fragment, moved in enumerate(sums):
        outer.meet(fragment, moved, step=step)


def _load_moved(saved: Saved, outer: Outer, *, step: int) -> None:
    """Take up exchanges that were under way."""
    outer.under_way = under_way(saved.index().tensors, outer.config, step=step)
    for fragment in outer.under_way:
        parts = {
            f"{_MOVED}{name}": like(p, torch.empty_like(local(outer.values[name])), tuple(p.shape))
            for name, p in outer.fragments[fragment]
        }
        if parts:
            load_into(saved, parts)
            outer.arrived[fragment] = torch.cat([local(part).flatten() for part in parts.values()])


def under_way(names: Collection[str], config: OuterConfig, *, step: int) -> set[int]:
    """Return the fragments whose exchange a checkpoint was taken in the middle of, whole, and goes on.

    Args:
        names: of all tensors that it holds; `config` may be another one since.

    >>> names = [f"{kind}layers.{block}.w" for kind in ("model.", "outer.moved.") for block in (0, 1)]
    >>> config = OuterConfig(every=4, fragments=2, overlap=1)
    >>> under_way(names, config, step=2), under_way(names[:3], config, step=4)
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
