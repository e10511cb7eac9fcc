"""Interface of update rules: states of one parameter, one update of many."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

States = dict[str, Tensor]
"""States of one parameter by name; sharded as the parameter is."""

ParamGroup = dict[str, Any]
"""Hyperparameters of a parameter group, by name."""


@dataclass(frozen=True, slots=True)
class Update:
    """One parameter in an update."""

    parameter: Tensor
    """The parameter, for its shape and sharding."""
    weight: Tensor
    """This rank's shard of it in float32, to be changed in place."""
    gradient: Tensor
    """This rank's shard of the gradient in float32."""
    states: States


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """An update rule."""

    init: Callable[[Tensor], States]
    """Returns the states of a parameter before its first step."""
    update: Callable[[Sequence[Update], ParamGroup, Tensor | None], None]
    """Changes weights and states in place; every rank calls it with the same parameters.

    The last argument, a float32 scalar on their device, divides the gradients: clipping, without a pass over
    them of its own. None: 1."""


def divided(gradient: Tensor, divisor: Tensor | None) -> Tensor:
    """Return the gradient divided by a scalar; itself if that is None."""
    return gradient if divisor is None else gradient / divisor
