"""Weight storage: float32, or bfloat16 with a float32 copy or stochastic rounding.

Every rule works in float32. A storage decodes a parameter's shard to float32 and encodes it again: the
weights themselves; a master copy beside the optimizer state that is rounded into the weights; or a temporary
copy, rounded stochastically. The random bits are a function of (seed, parameter, step, index of the element),
so weights do not depend on the number of ranks, and a resumed run rounds as an uninterrupted one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.nn.dtensor import detached_local
from penstock.nn.linear.rounding import round_stochastically
from penstock.nn.random_bits import element_indices, keyed_bits
from penstock.train.optim.rule import States


@dataclass(frozen=True, slots=True)
class WeightStorage:
    """A storage format of weights."""

    dtype: torch.dtype
    """Dtype of the parameters."""
    init: Callable[[Tensor], States]
    """Returns the additional state of a parameter."""
    opened: Callable[[Tensor, States], Tensor]
    """Returns this rank's shard in float32, to be changed in place."""
    close: Callable[[Tensor, Tensor, int], None] | None = None
    """Writes a changed float32 shard back, given a key of random bits; None: it was changed in place."""
    at_once: int | None = None
    """Maximum numbers of parameters decoded together, if decoding takes memory."""


def _nothing(_: Tensor) -> States:
    return {}


def _itself(parameter: Tensor, _: States) -> Tensor:
    return detached_local(parameter)


def _copy(parameter: Tensor) -> States:
    return {"master": parameter.detach().float()}


def _the_copy(_: Tensor, states: States) -> Tensor:
    return detached_local(states["master"])


def _to_nearest(parameter: Tensor, weight: Tensor, _: int) -> None:
    detached_local(parameter).copy_(weight)


def _for_now(parameter: Tensor, _: States) -> Tensor:
    return detached_local(parameter).float()


def _at_random(parameter: Tensor, weight: Tensor, key: int) -> None:
    target, source = detached_local(parameter).view(-1), weight.view(-1)
    for some, index in element_indices(parameter):
        target[some] = round_stochastically(source[some], keyed_bits(index, key))


STORAGES: Mapping[str, WeightStorage] = {
    "float32": WeightStorage(torch.float32, _nothing, _itself),
    "bfloat16_master": WeightStorage(torch.bfloat16, _copy, _the_copy, _to_nearest),
    "bfloat16_stochastic": WeightStorage(torch.bfloat16, _nothing, _for_now, _at_random, at_once=2**26),
}
