"""What a rule is: states of one parameter, and one update of many."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

States = dict[str, Tensor]
"""Of one parameter, by name; whole or sharded as the parameter is."""

Group = dict[str, Any]
"""Hyperparameters of an optimizer's group: numbers by name."""


@dataclass(frozen=True, slots=True)
class Update:
    """One parameter in an update."""

    parameter: Tensor
    """For its shape and its place on the ranks."""
    weight: Tensor
    """What this rank holds of it, float32: to be changed in place."""
    gradient: Tensor
    """What this rank holds of the gradient, float32."""
    states: States


@dataclass(frozen=True, slots=True)
class Rule:
    """A way in which weights follow gradients."""

    init: Callable[[Tensor], States]
    """The states of a parameter before its first step."""
    update: Callable[[Sequence[Update], Group], None]
    """Change weights and states in place; every rank calls it with the same parameters."""
