"""Optimizer of a run: parameter groups with update rules, over weights of any storage."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.rng import key_of
from penstock.nn.dtensor import detached_local
from penstock.nn.kinds import parameter_kinds
from penstock.train.optim import adamw, adamw_8bit, muon
from penstock.train.optim.rule import Update, UpdateRule
from penstock.train.optim.weight_storage import STORAGES, WeightStorage
from penstock.train.recipe.optim_config import OptimConfig

RULES: Mapping[str, UpdateRule] = {
    "adamw": UpdateRule(adamw.init, adamw.update),
    "adamw_8bit": UpdateRule(adamw_8bit.init, adamw_8bit.update),
    "muon": UpdateRule(muon.init, muon.update),
}

Named = tuple[str, nn.Parameter]
"""Name and parameter."""


class Optimizer(torch.optim.Optimizer):
    """Updates parameters by the rules of their groups; its states exist from the start.

    Works on plain and sharded (DTensor) parameters; states are sharded as their parameters are.

    Args:
        groups: each with "named" parameters, "rule" and the rule's hyperparameters.
        storage: storage of the parameters' values.
        seed: seed of stochastic rounding.
    """

    # torch keeps its compiler out of these two, and loads it to do so: two seconds, where nothing is compiled
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    def __init__(self, groups: Sequence[dict[str, Any]], *, storage: WeightStorage, seed: int) -> None:
        self.storage = storage
        self.seed = seed
        self.names = {id(p): name for group in groups for name, p in group["named"]}
        super().__init__([{"params": [p for _, p in g["named"]], **_numbers(g)} for g in groups], {})
        for group in self.param_groups:
            for parameter in group["params"]:
                states = RULES[group["rule"]].init(parameter)
                self.state[parameter] = {**states, **storage.init(parameter)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *, divisor: float = 1.0) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; every rank must call it.

        Args:
            divisor: divides the gradients, to clip them; the gradients may be divided in place.
        """
        assert closure is None, closure
        device = detached_local(self.param_groups[0]["params"][0]).device
        scale = None if divisor == 1.0 else torch.full((), divisor, dtype=torch.float32, device=device)
        for group in self.param_groups:
            for parameters in _runs(group["params"], at_once=self.storage.at_once):
                updates = [self._opened(p, p.grad) for p in parameters if p.grad is not None]
                RULES[group["rule"]].update(updates, group, scale)
                self._close(updates)

    def _opened(self, parameter: Tensor, gradient: Tensor) -> Update:
        states = self.state[parameter]
        weight = self.storage.opened(parameter, states)
        return Update(parameter, weight, detached_local(gradient).float(), states)

    def _close(self, updates: list[Update]) -> None:
        if self.storage.close is None or not updates:
            return
        step = int(updates[0].states["step"])  # one synchronisation with the device, not one per parameter
        for one in updates:
            key = key_of(self.seed, "round", self.names[id(one.parameter)], step)
            self.storage.close(one.parameter, one.weight, key)


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "named"}


def _runs(parameters: Sequence[Tensor], *, at_once: int | None) -> Iterator[list[Tensor]]:
    """Yield runs of parameters with at most `at_once` numbers, at least one each, the same on all ranks."""
    run: list[Tensor] = []
    for parameter in parameters:
        if run and at_once is not None and sum(p.numel() for p in run) + parameter.numel() > at_once:
            yield run
            run = []
        run.append(parameter)
    yield run


def build_optimizer(
    model: nn.Module, config: OptimConfig, *, weights: str = "float32", seed: int = 0
) -> Optimizer:
    """Build the optimizer of a recipe, over all parameters that need a gradient.

    Matrices have weight decay; norms and biases have none. Muon is for the matrices of `model.layers`; the
    embedding, the output matrix, norms and biases use AdamW.

    Args:
        weights: storage of the parameters' values: a name in STORAGES.
        seed: seed of stochastic rounding.
    """
    learned = [(name, p, kind) for name, p, kind in parameter_kinds(model) if p.requires_grad]
    storage = STORAGES[weights]
    assert all(p.dtype == storage.dtype for _, p, _ in learned), weights
    is_muon = config.rule == "muon"
    matrices = {name for name, _, kind in learned if kind.name == "matrix"}
    inner = {name for name in matrices if is_muon and name.startswith("layers.")}
    vectors = {name for name, _, _ in learned} - matrices
    rest, decay = "adamw" if is_muon else config.rule, config.weight_decay
    groups = [  # as few as possible: the kernels of a group are launched together
        _group(rule, [(name, p) for name, p, _ in learned if name in names], config, decay=decay)
        for rule, names, decay in (
            (config.rule, inner, decay),
            (rest, matrices - inner, decay),
            (rest, vectors, 0.0),
        )
    ]
    return Optimizer([group for group in groups if group["named"]], storage=storage, seed=seed)


def _group(rule: str, named: list[Named], config: OptimConfig, *, decay: float) -> dict[str, Any]:
    return {
        "named": named,
        "rule": rule,
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "momentum": config.momentum,
        "weight_decay": decay,
    }
