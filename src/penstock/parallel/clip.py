"""Global norm of gradients on any mesh with any placement, for clipping.

torch's `clip_grad_norm_` stacks the norms of all gradients and fails if they are on different meshes. Here
every rank adds up the squares it holds, weighting an element that n ranks hold by 1/n, and one all-reduce of
one number gives the square of the norm. Nothing here waits for the device.
"""

import math
from collections.abc import Iterable

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from penstock.nn.dtensor import is_dtensor, local


@torch.no_grad()
def squared_norm(
    parameters: Iterable[nn.Parameter], device: torch.device, *, twice: nn.Parameter | None = None
) -> Float64[Tensor, "1"]:
    """Return this rank's share of the squared norm of the gradients, on a device.

    Args:
        device: device of the ranks' communication; gradients may be offloaded.
        twice: a parameter that another pipeline stage holds too (the tied embedding).
    """
    found = [(p.grad, 2 if p is twice else 1) for p in parameters if p.grad is not None]
    if not found:
        return torch.zeros(1, dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm([local(gradient) for gradient, _ in found])).double()
    copies = [num_copies(gradient) * n for gradient, n in found]
    if all(n == 1 for n in copies):  # nothing is uploaded
        return norms.dot(norms)[None].to(device)
    weights = torch.tensor(copies, dtype=torch.float64, device=norms.device)
    return (norms.square() / weights).sum()[None].to(device)


def divisor(norm: float, largest: float) -> float:
    """Return what gradients of a norm are divided by so that their norm is at most `largest`.

    1.0 if the norm is not finite: the step guard skips that step.

    >>> divisor(0.5, 1.0), divisor(math.nan, 1.0), round(divisor(3.0, 1.5), 4)
    (1.0, 1.0, 2.0)
    """
    return (norm + 1e-6) / largest if largest < norm < math.inf else 1.0


def num_copies(gradient: Tensor) -> int:
    """Return the number of ranks with the same elements as this one; 1 for a plain tensor."""
    if not is_dtensor(gradient):
        return 1
    placements = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in placements if placement.is_replicate())
