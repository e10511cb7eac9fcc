"""Computation of a given length that takes no processor: blocks sleep until their time is up.

On a machine of two cores, two ranks and gloo's threads share them: any network is fast beside such compute. A
paced block computes what it always does, so losses are real, and then sleeps, while gloo's threads move bytes
as they would beside a GPU. The forward pass is given a third of the time, the backward pass two thirds.
"""

import functools

import torch

from penstock.core import clock
from penstock.models.decoder.model import Block
from penstock.parallel.ethernet.breadth_first import EachMicroBatch


def pace(model, *, seconds, num_blocks):
    """Let the blocks of a model take so long, in sum, for a forward and a backward pass, and no less.

    Args:
        num_blocks: of the whole model, of which this may be a stage.
    """
    each = seconds / num_blocks
    times = {"forward_s": each / 3, "backward_s": each * 2 / 3}
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        if isinstance(block.forward, EachMicroBatch):
            block.forward.one = _paced(block.forward.one, **times)
        else:
            block.forward = _paced(block.forward, **times)


def _paced(forward, *, forward_s, backward_s):
    """Wrap a block's forward: inside of FSDP's hooks, so its parameters are gathered while it sleeps."""

    @functools.wraps(forward)
    def paced(x, *others, **named):
        begun = clock.monotonic()
        backward_began = []
        y = forward(_Last.apply(x, backward_began, backward_s), *others, **named)
        _sleep_until(begun + forward_s)
        return _First.apply(y, backward_began)

    return paced


class _First(torch.autograd.Function):
    """Notes when the backward pass of a block begins."""

    @staticmethod
    def forward(ctx, y, began):
        ctx.began = began
        return y.clone()  # FSDP2 warns of a module that returns a view

    @staticmethod
    def backward(ctx, gradient):
        ctx.began.append(clock.monotonic())
        return gradient, None


class _Last(torch.autograd.Function):
    """Sleeps at the end of the backward pass of a block."""

    @staticmethod
    def forward(ctx, x, began, seconds):
        ctx.began, ctx.seconds = began, seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        _sleep_until(ctx.began.pop() + ctx.seconds)
        return gradient, None, None


def _sleep_until(moment):
    clock.sleep(max(0.0, moment - clock.monotonic()))
