"""Breadth-first schedule: a block processes all micro-batches before the next block (arXiv:2211.05953).

Two micro-batches a and b through blocks 1 to 3, forward and backward (Lamy-Poirier, 2022):

    depth first      1a 2a 3a 3a 2a 1a   1b 2b 3b 3b 2b 1b
    breadth first    1a 1b 2a 2b 3a 3b   3b 3a 2b 2a 1b 1a

Depth first, a block is gathered and reduced for each micro-batch, or stays gathered meanwhile. Breadth first,
it is gathered once forward, once backward, and reduced once, overlapped with the compute of *all*
micro-batches in the blocks around it, and nothing stays gathered unused. The price is memory: no backward
pass starts before the last forward pass has ended, so blocks keep the activations of all micro-batches.

A step has one pass, whose blocks process the micro-batches one after the other. The gathering, reducing and
prefetching around a block sees one call with tuples, and needs no change. Inside, each micro-batch has its
own backward pass: in one joint graph, autograd would sum the gradients in the compute dtype, bfloat16. So
they add up as in plain gradient accumulation.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from penstock.parallel.sharding.fsdp_private import FsdpUnit

Forward = Callable[..., Tensor]


class EachMicroBatch:
    """Forward of a block for one micro-batch, or for several in tuples, one after the other.

    Args:
        one: forward of one micro-batch, possibly recomputed and compiled.
        add_up: called in the backward pass after the gradients of each micro-batch.
    """

    def __init__(self, one: Forward, add_up: Callable[[], None]) -> None:
        self.one, self._add_up = one, add_up

    def __call__(
        self, x: Tensor | tuple[Tensor, ...], *others: Any, **named: Any
    ) -> Tensor | tuple[Tensor, ...]:
        """Run the block; with a tuple of inputs `others` are tuples too."""
        if not isinstance(x, tuple):
            return self.one(x, *others, **named)
        if torch.is_grad_enabled():  # over a frozen embedding the first block's inputs have no graph
            x = tuple(each if each.requires_grad else each.detach().requires_grad_() for each in x)
        found = _EachInTurn.apply(self.one, self._add_up, [*zip(*others, strict=True)], *x)  # type: ignore[no-untyped-call]
        return cast(tuple[Tensor, ...], found)


class _EachInTurn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # Any: torch adds the attributes
        one: Forward,
        add_up: Callable[[], None],
        others: list[tuple[Any, ...]],
        *x: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.add_up, ctx.graphs = add_up, []
        for mine, rest in zip(x, others, strict=True):
            with torch.enable_grad():
                given = mine.detach().requires_grad_()
                ctx.graphs.append((given, one(given, *rest)))
        return tuple(out.detach() for _, out in ctx.graphs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = []
        for gradient in reversed(gradients):
            given, out = ctx.graphs.pop()
            torch.autograd.backward(out, gradient)
            del out
            ctx.add_up()
            found.append(given.grad)
        return None, None, None, *reversed(found)


def take_micro_batches(model: nn.Module, units: "list[FsdpUnit]") -> None:
    """Make the blocks of a model accept several micro-batches, in place.

    Args:
        model: its blocks are `model.layers`.
        units: its FSDP units; empty if it is not sharded.
    """
    add_up = {unit.module: unit.add_up for unit in units}
    for block in model.layers:  # type: ignore[union-attr]
        block.forward = EachMicroBatch(block.forward, add_up.get(block, _nothing))


def _nothing() -> None:
    return None
