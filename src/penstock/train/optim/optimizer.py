"""The optimizer of a run: groups of parameters, each with a rule, over weights of any storage."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.train.optim import adamw, adamw_8bit, muon
from penstock.train.optim.config import OptimConfig
from penstock.train.optim.rule import Rule, Update
from penstock.train.optim.shards import local

RULES: Mapping[str, Rule] = {
    "adamw": Rule(adamw.init, adamw.update),
    "adamw_8bit": Rule(adamw_8bit.init, adamw_8bit.update),
    "muon": Rule(muon.init, muon.update),
}


class Optimizer(torch.optim.Optimizer):
    """Changes parameters by the rules of their groups; its states exist from the start.

    Works on plain and on sharded (DTensor) parameters; states lie on the ranks as their parameters do.

    Args:
        groups: each with "params", "rule" and the rule's numbers.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = RULES[group["rule"]].init(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Change every parameter that has a gradient; every rank must call it."""
        assert closure is None, closure
        for group in self.param_groups:
            updates = [
                Update(p, local(p), local(p.grad), self.state[p])
                for p in group["params"]
                if p.grad is not None
            ]
            RULES[group["rule"]].update(updates, group)


def build_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """Make the optimizer that a recipe asks for, over all parameters that need a gradient.

    Norms and biases (one dimension) are not decayed. Muon is for the matrices of `model.layers`; the
    embedding, the output matrix, norms and biases follow AdamW.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    layers = getattr(model, "layers", None)
    inner = {id(p) for p in layers.parameters() if p.ndim == 2} if isinstance(layers, nn.Module) else set()
    rest = "adamw" if config.rule == "muon" else config.rule
    groups = [
        _group(config.rule, [p for p in parameters if id(p) in inner], config, decay=config.weight_decay),
        _group(
            rest,
            [p for p in parameters if p.ndim > 1 and id(p) not in inner],
            config,
            decay=config.weight_decay,
        ),
        _group(rest, [p for p in parameters if p.ndim <= 1], config, decay=0.0),
    ]
    return Optimizer([group for group in groups if group["params"]])


def _group(rule: str, parameters: list[Tensor], config: OptimConfig, *, decay: float) -> dict[str, Any]:
    return {
        "params": parameters,
        "rule": rule,
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "momentum": config.momentum,
        "weight_decay": decay,
    }
