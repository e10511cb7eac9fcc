"""Islands: copies of the model that train by themselves and meet every so many steps (DiLoCo).

Each rank keeps, beside its shards of the island's parameters, the *outer* parameters, which are the same on
all islands, and their momentum. What the islands moved by since they last met, on average, is the gradient of
an outer optimizer:

    moved    = mean over islands of (outer - own)
    momentum = m * momentum + moved                      Nesterov's, as torch.optim.SGD has it
    outer    = outer - lr * (moved + m * momentum)       average: outer - moved, which is the islands' mean
    own      = mixing * own + (1 - mixing) * outer

The moments of the inner optimizer stay with their island. The model of the run, which is validated, saved as
`model.` and exported, is the outer one. Sources: Douillard et al., "DiLoCo", arXiv:2311.08105; "Streaming
DiLoCo", arXiv:2501.18512; local SGD: Stich, ICLR 2019. When which part meets is said in outer_schedule.py.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from penstock.core.rng import key_of
from penstock.parallel.exchange import MeanExchange
from penstock.parallel.mesh import Mesh, World
from penstock.train.optim.optimizer import Named, Optimizer
from penstock.train.optim.shards import like, local
from penstock.train.outer_config import OuterConfig
from penstock.train.outer_schedule import CODECS, due, fragment_of


class Outer:
    """The outer parameters and optimizer of one rank; every rank calls each method at the same step.

    Args:
        model: sharded over the ranks of an island.
        optimizer: the inner one; it says how weights are kept.
        mesh: whose islands exchange.
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
        """What the islands moved by, of exchanges that a checkpoint was taken in the middle of."""
        self.under_way: set[int] = set()
        """Fragments whose exchange has not arrived; the same on all ranks, even those that hold none."""
        self.has_met = True
        """Whether all islands have the outer parameters: at the start, and after a step at which all meet."""
        self.begin_anew()

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Make the outer parameters this island's, without momentum; all islands have the same."""
        self._exchanges, self.arrived, self.under_way = {}, {}, set()
        for name, parameter in self._named():
            local(self.values[name]).copy_(self._own(parameter))
            if self.config.rule == "nesterov":
                self.momenta[name] = torch.zeros_like(self.values[name])

    @torch.no_grad()
    def after(self, step: int, *, last: bool) -> None:
        """Do what is due after an inner step: exchanges begin, turn and arrive.

        Args:
            step: counted from 1.
            last: of the run: everything meets.
        """
        now = due(self.config, step, last=last)
        for fragment in now.begin:
            self._arrive(fragment, step)  # is under way only if the run ends in the middle of an exchange
            self._begin(fragment)
        for fragment in now.turn:
            if fragment in self._exchanges:
                self._exchanges[fragment].turn()
        arrived = [self._arrive(fragment, step, whole=last) for fragment in now.arrive]
        is_whole = last or not self.config.mixing
        self.has_met = is_whole and len(arrived) == self.config.fragments and all(arrived)

    @property
    def meets_whole(self) -> bool:
        """Whether there are steps after which all islands have the outer parameters."""
        return self.config.fragments == 1 and not self.config.mixing

    def state_dict(self) -> dict[str, int | bool]:
        """Return what is not in tensors, as JSON values."""
        return {"islands": self.num_islands, "has_met": self.has_met}

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let the model have the outer parameters for a while."""
        own = [(p, local(p).clone()) for _, p in self._named()]
        with torch.no_grad():
            for name, parameter in self._named():
                local(parameter).copy_(local(self.values[name]))
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, before in own:
                    local(parameter).copy_(before)
            for module in self._model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # what is still gathered is of the outer parameters

    def mean_moved(self, fragment: int) -> Tensor | None:
        """Return what the islands moved by, of an exchange under way; waits for it. None: there is none."""
        if fragment in self._exchanges:
            self.arrived[fragment] = self._exchanges.pop(fragment).result()
        return self.arrived.get(fragment)

    def moved(self, fragment: int) -> Tensor:
        """Return how far this island's parameters are from the outer ones, flat, float32."""
        parts = [(local(self.values[name]) - self._own(p)).flatten() for name, p in self.fragments[fragment]]
        return torch.cat(parts) if parts else torch.empty(0)

    @torch.no_grad()
    def meet(self, fragment: int, moved: Tensor, *, step: int, mixing: float = 0.0) -> None:
        """Take an outer step.

        Args:
            moved: by the islands, on average.
            mixing: share of its own parameters that this island keeps.
        """
        named = self.fragments[fragment]
        for (name, parameter), flat in zip(named, split_like(moved, named), strict=True):
            own, outer = self._own(parameter), local(self.values[name])
            self._update(name, outer, flat.view_as(outer))
            own.lerp_(outer, 1 - mixing) if mixing else own.copy_(outer)
            if self._optimizer.storage.close is not None:
                key = key_of(self._optimizer.seed, "outer", name, step)
                self._optimizer.storage.close(parameter, own, key)

    def _update(self, name: str, outer: Tensor, moved: Tensor) -> None:
        if self.config.rule == "average":
            outer.sub_(moved)
            return
        momentum = local(self.momenta[name])
        momentum.mul_(self.config.momentum).add_(moved)
        outer.sub_(moved + self.config.momentum * momentum, alpha=self.config.learning_rate)

    def _begin(self, fragment: int) -> None:
        self.under_way.add(fragment)
        if (moved := self.moved(fragment)).numel():
            self._exchanges[fragment] = MeanExchange(moved, self._group, CODECS[self.config.bits])

    def _arrive(self, fragment: int, step: int, *, whole: bool = False) -> bool:
        """Take up what the islands moved by, if that is under way; return whether it was.

        Args:
            whole: they took no steps meanwhile, so nothing of their own is kept.
        """
        if fragment not in self.under_way:  # islands begin, or resume on another number, after it would have
            return False
        self.under_way.remove(fragment)
        if (moved := self.mean_moved(fragment)) is not None:
            del self.arrived[fragment]
            self.meet(fragment, moved, step=step, mixing=0.0 if whole else self.config.mixing)
        return True

    def _named(self) -> Iterator[Named]:
        for fragment in self.fragments:
            yield from fragment

    def _own(self, parameter: Tensor) -> Tensor:
        """Return what this rank holds of a parameter of its island, in float32."""
        return self._optimizer.storage.opened(parameter, self._optimizer.state[parameter])

    def _like(self, parameter: Tensor, here: Tensor) -> Tensor:
        return like(parameter, here, tuple(parameter.shape))


def split_like(flat: Tensor, named: Sequence[Named]) -> tuple[Tensor, ...]:
    """Cut a flat tensor into the parts that this rank holds of some parameters."""
    return torch.split(flat, [local(parameter).numel() for _, parameter in named])


def norm_of_islands(norm: float, world: World) -> float:
    """Return the root mean square of the islands' gradient norms; every rank must call it with its own's."""
    return math.sqrt(world.sum(norm * norm)[0] / world.ranks.world_size)
