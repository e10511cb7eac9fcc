"""Outer optimizer of islands: copies of the model that train independently and average (DiLoCo).

Each rank keeps, besides its shards of the island's parameters, the *outer* parameters, which are equal on all
islands, and their momentum. The mean change of the islands since the last outer step is the gradient of an
outer optimizer:

    moved    = mean over islands of (outer - own)
    momentum = m * momentum + moved                      Nesterov momentum, as in torch.optim.SGD
    outer    = outer - lr * (moved + m * momentum)       rule "average": outer - moved, the islands' mean
    own      = mixing * own + (1 - mixing) * outer

The states of the inner optimizer stay with their island. The model of the run, which is validated, saved as
`model.` and exported, is the outer one. Sources: Douillard et al., "DiLoCo", arXiv:2311.08105; "Streaming
DiLoCo", arXiv:2501.18512; local SGD: Stich, ICLR 2019. schedule.py decides which fragment syncs when.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from penstock.core.rng import key_of
from penstock.nn.dtensor import detached_local
from penstock.parallel.ethernet.compressed_all_reduce import MeanExchange
from penstock.parallel.mesh import Mesh
from penstock.parallel.sharding.fsdp_private import units_of
from penstock.parallel.slices import like
from penstock.train.islands.schedule import CODECS, due, fragment_of
from penstock.train.optim.optimizer import Named, Optimizer
from penstock.train.recipe.outer_config import OuterConfig


class Outer:
    """Outer parameters and optimizer of one rank; every rank calls each method at the same step.

    Args:
        model: sharded over the ranks of an island.
        optimizer: the inner optimizer; it defines the storage of weights.
        mesh: device mesh; its replicate axis has the islands.
    """

    def __init__(self, config: OuterConfig, model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> None:
        self.config, self._model, self._optimizer = config, model, optimizer
        self._group = mesh.state["replicate"].get_group()
        self.island = mesh.layout.place(mesh.rank)["replicate"]
        self.num_islands = mesh.layout.replicate
        parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.fragments: list[list[Named]] = [
            [(name, p) for name, p in parameters if fragment_of(name, config.fragments) == fragment]
            for fragment in range(config.fragments)
        ]
        self.values = {name: self._like(p, self._own(p).clone()) for name, p in parameters}
        self.momenta: dict[str, Tensor] = {}
        self._exchanges: dict[int, MeanExchange] = {}
        self.arrived: dict[int, Tensor] = {}
        """Fragment -> mean change, for exchanges restored from a checkpoint."""
        self.in_progress: set[int] = set()
        """Fragments with an exchange in progress; equal on all ranks, even those that hold no part of
        them."""
        self.has_met = True
        """True if all islands have the outer parameters: at the start, and after a complete sync."""
        self.begin_anew()

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Copy this island's parameters to the outer ones, without momentum; all islands have the same."""
        self._exchanges, self.arrived, self.in_progress = {}, {}, set()
        for name, parameter in self._named():
            detached_local(self.values[name]).copy_(self._own(parameter))
            if self.config.rule == "nesterov":
                self.momenta[name] = torch.zeros_like(self.values[name])

    @torch.no_grad()
    def after(self, step: int, *, last: bool) -> None:
        """Do what is due after an inner step: start, turn and complete exchanges.

        Args:
            step: number of the step, from 1.
            last: True for the last step of the run: everything syncs.
        """
        now = due(self.config, step, last=last)
        for fragment in now.begin:
            self._arrive(fragment, step)  # in progress only if the run ends during an exchange
            self._begin(fragment)
        for fragment in now.turn:
            if fragment in self._exchanges:
                self._exchanges[fragment].turn()
        arrived = [self._arrive(fragment, step, whole=last) for fragment in now.arrive]
        is_whole = last or not self.config.mixing
        self.has_met = is_whole and len(arrived) == self.config.fragments and all(arrived)

    @property
    def meets_whole(self) -> bool:
        """True if there are steps after which all islands have the outer parameters."""
        return self.config.fragments == 1 and not self.config.mixing

    def state_dict(self) -> dict[str, int | bool]:
        """Return the state besides tensors, as JSON values."""
        return {"islands": self.num_islands, "has_met": self.has_met}

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Context manager: the model has the outer parameters."""
        own = [(p, detached_local(p).clone()) for _, p in self._named()]
        with torch.no_grad():
            for name, parameter in self._named():
                detached_local(parameter).copy_(detached_local(self.values[name]))
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, before in own:
                    detached_local(parameter).copy_(before)
            for unit in units_of(self._model):
                unit.module.reshard()  # gathered parameters are the outer ones

    def mean_moved(self, fragment: int) -> Tensor | None:
        """Return the islands' mean change from an exchange in progress, waiting for it; None: no exchange."""
        if fragment in self._exchanges:
            self.arrived[fragment] = self._exchanges.pop(fragment).result()
        return self.arrived.get(fragment)

    def moved(self, fragment: int) -> Tensor:
        """Return this island's distance from the outer parameters, flat, float32."""
        parts = [
            (detached_local(self.values[name]) - self._own(p)).flatten()
            for name, p in self.fragments[fragment]
        ]
        return torch.cat(parts) if parts else torch.empty(0)

    @torch.no_grad()
    def meet(self, fragment: int, moved: Tensor, *, step: int, mixing: float = 0.0) -> None:
        """Take an outer step.

        Args:
            moved: mean change of the islands.
            mixing: share of its own parameters that this island keeps.
        """
        named = self.fragments[fragment]
        for (name, parameter), flat in zip(named, split_like(moved, named), strict=True):
            own, outer = self._own(parameter), detached_local(self.values[name])
            self._update(name, outer, flat.view_as(outer))
            own.lerp_(outer, 1 - mixing) if mixing else own.copy_(outer)
            if self._optimizer.storage.close is not None:
                key = key_of(self._optimizer.seed, "outer", name, step)
                self._optimizer.storage.close(parameter, own, key)

    def _update(self, name: str, outer: Tensor, moved: Tensor) -> None:
        if self.config.rule == "average":
            outer.sub_(moved)
            return
        momentum = detached_local(self.momenta[name])
        momentum.mul_(self.config.momentum).add_(moved)
        outer.sub_(moved + self.config.momentum * momentum, alpha=self.config.learning_rate)

    def _begin(self, fragment: int) -> None:
        self.in_progress.add(fragment)
        if (moved := self.moved(fragment)).numel():
            self._exchanges[fragment] = MeanExchange(moved, self._group, CODECS[self.config.bits])

    def _arrive(self, fragment: int, step: int, *, whole: bool = False) -> bool:
        """Complete an exchange if it is in progress; return whether it was.

        Args:
            whole: True: the islands took no steps meanwhile, so no own share is kept.
        """
        if fragment not in self.in_progress:  # started, or resumed on other islands, too late for it
            return False
        self.in_progress.remove(fragment)
        if (moved := self.mean_moved(fragment)) is not None:
            del self.arrived[fragment]
            self.meet(fragment, moved, step=step, mixing=0.0 if whole else self.config.mixing)
        return True

    def _named(self) -> Iterator[Named]:
        for fragment in self.fragments:
            yield from fragment

    def _own(self, parameter: Tensor) -> Tensor:
        """Return this rank's shard of a parameter of its island, in float32."""
        return self._optimizer.storage.opened(parameter, self._optimizer.state[parameter])

    def _like(self, parameter: Tensor, here: Tensor) -> Tensor:
        return like(parameter, here, tuple(parameter.shape))


def split_like(flat: Tensor, named: Sequence[Named]) -> tuple[Tensor, ...]:
    """Split a flat tensor into this rank's shards of some parameters."""
    return torch.split(flat, [detached_local(parameter).numel() for _, parameter in named])
