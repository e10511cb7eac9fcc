"""Clip the norm of the whole gradient, whatever mesh and placement each part of it has.

torch's `clip_grad_norm_` stacks the norms of all gradients and fails where they lie on different
meshes. Here every rank adds up the squares it holds, an element that n ranks hold counting 1/n, and
one sum of one number over all ranks gives the norm.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.parallel.mesh import World


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], largest: float, world: World, *, twice: nn.Parameter | None = None
) -> float:
    """Scale the gradients in place so that their norm is at most `largest`; every rank must call it.

    Args:
        twice: one of the parameters, which another stage of the pipeline holds too.

    Returns:
        The norm before, over all parameters of all ranks.
    """
    found = [(p.grad, 2 if p is twice else 1) for p in parameters if p.grad is not None]
    held = [_local(gradient) for gradient, _ in found]
    copies = torch.tensor([num_copies(gradient) * n for gradient, n in found], dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm(held)).double().cpu()
    norm = math.sqrt(world.sum((norms.square() / copies).sum().item())[0])
    if norm > largest:  # a norm that is not a number clips nothing: the step refuses it
        torch._foreach_mul_(held, largest / (norm + 1e-6))
    return norm


def num_copies(gradient: Tensor) -> int:
    """Return how many ranks hold the same elements as this one; a plain tensor is on one."""
    if not isinstance(gradient, DTensor):
        return 1
    placements = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in placements if placement.is_replicate())


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
