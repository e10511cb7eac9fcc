"""How weights are kept between steps: float32, or bfloat16 with a float32 copy or random rounding.

Every rule works on float32. A storage gives it the float32 numbers of a parameter's shard and takes them
back: the weights themselves; a copy that lives beside the moments and is rounded into the weights; or a
copy for the moment of the update, rounded up or down at random. The random bits are a function of (seed,
parameter, step, index of the element), so weights do not depend on the number of ranks, and a resumed run
rounds as one that was never stopped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.nn.init import element_indices, keyed_bits
from penstock.nn.low_bit import round_stochastically
from penstock.train.optim.rule import States
from penstock.train.optim.shards import local


@dataclass(frozen=True, slots=True)
class Storage:
    """One way to keep weights."""

    dtype: torch.dtype
    """Of the parameters."""
    init: Callable[[Tensor], States]
    """What is kept beside a parameter."""
    opened: Callable[[Tensor, States], Tensor]
    """This rank's float32 numbers, to be changed in place."""
    close: Callable[[Tensor, Tensor, int], None] | None = None
    """Put changed float32 numbers into a parameter, given a key of random bits; None: they are in it."""
    at_once: int | None = None
    """Numbers of whole parameters open together, where opening takes memory."""


def _nothing(_: Tensor) -> States:
    return {}


def _itself(parameter: Tensor, _: States) -> Tensor:
    return local(parameter)


def _copy(parameter: Tensor) -> States:
    return {"master": parameter.detach().float()}


def _the_copy(_: Tensor, states: States) -> Tensor:
    return local(states["master"])


def _to_nearest(parameter: Tensor, weight: Tensor, _: int) -> None:
    local(parameter).copy_(weight)


def _for_now(parameter: Tensor, _: States) -> Tensor:
    return local(parameter).float()


def _at_random(parameter: Tensor, weight: Tensor, key: int) -> None:
    target, source = local(parameter).view(-1), weight.view(-1)
    for some, index in element_indices(parameter):
        target[some] = round_stochastically(source[some], keyed_bits(index, key))


STORAGES: Mapping[str, Storage] = {
    "float32": Storage(torch.float32, _nothing, _itself),
    "bfloat16_master": Storage(torch.bfloat16, _copy, _the_copy, _to_nearest),
    "bfloat16_stochastic": Storage(torch.bfloat16, _nothing, _for_now, _at_random, at_once=2**26),
}
