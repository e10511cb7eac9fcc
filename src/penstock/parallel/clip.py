"""Gradient clipping by the global norm, for gradients on any mesh with any placement.

torch's `clip_grad_norm_` stacks the norms of all gradients and fails if they are on different meshes. Here
every rank adds up the squares it holds, weighting an element that n ranks hold by 1/n, and one all-reduce of
one number gives the norm.
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
    """Scale the gradients in place to a norm of at most `largest`; every rank must call it.

    Args:
        twice: a parameter that another pipeline stage holds too (the tied embedding).

    Returns:
        The norm before clipping, over all parameters of all ranks.
    """
    found = [(p.grad, 2 if p is twice else 1) for p in parameters if p.grad is not None]
    held = [_local(gradient) for gradient, _ in found]
    copies = torch.tensor([num_copies(gradient) * n for gradient, n in found], dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm(held)).double().cpu()
    norm = math.sqrt(world.sum((norms.square() / copies).sum().item())[0])
    if norm > largest:  # False for NaN: the step guard skips that step
        torch._foreach_mul_(held, largest / (norm + 1e-6))
    return norm


def num_copies(gradient: Tensor) -> int:
    """Return the number of ranks with the same elements as this one; 1 for a plain tensor."""
    if not isinstance(gradient, DTensor):
        return 1
    placements = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in placements if placement.is_replicate())


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
