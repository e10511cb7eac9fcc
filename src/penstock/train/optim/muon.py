"""Muon: orthogonalised momentum (Jordan et al., kellerjordan.github.io/posts/muon, 2024).

A matrix moves along the orthogonal matrix nearest to its momentum, approximated by a few Newton-Schulz
iterations: steps of equal size in every direction. The iterations need the whole matrix, of which a rank
holds some rows. So matrices are assigned to ranks: one exchange brings the shards of each matrix to its
owner, which computes it alone, another one returns the shards of the result, both in bfloat16, in which the
iterations work anyway. No work is done twice within a shard group, and a rank sends its own shard twice.
Hybrid replicas each compute by themselves, rather than send results between nodes.

Results are bit-identical to torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"`, on any number of ranks.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.nn.dtensor import detached_local
from penstock.train.optim.rule import ParamGroup, States, Update, divided
from penstock.train.optim.whole_matrices import map_whole

_A, _B, _C = 3.4445, -4.7750, 2.0315  # Jordan's quintic: steep at zero, within [0.7, 1.2] after 5 iterations
_ITERATIONS = 5
_EPS = 1e-7
_RMS_OF_ADAMW = 0.2  # Liu et al., "Muon is scalable for LLM training", arXiv:2502.16982, section 2.2


def init(parameter: Tensor) -> States:
    """Return zero momentum and the step count."""
    return {"step": torch.zeros(()), "momentum": torch.zeros_like(parameter, dtype=torch.float32)}


def update(updates: Sequence[Update], group: ParamGroup, divisor: Tensor | None) -> None:
    """Take one step; every rank of a shard group must call it with the same matrices."""
    directions = []
    for one in updates:
        one.states["step"] += 1
        gradient = divided(one.gradient, divisor)
        momentum = detached_local(one.states["momentum"]).lerp_(gradient, 1 - group["momentum"])
        directions.append(gradient.lerp(momentum, group["momentum"]).bfloat16())
    parameters = [one.parameter for one in updates]
    for one, step in zip(updates, map_whole(orthogonal, directions, parameters, cost=_cost), strict=True):
        rate = group["lr"] * _RMS_OF_ADAMW * math.sqrt(max(one.parameter.shape))
        one.weight.mul_(1 - group["lr"] * group["weight_decay"])
        one.weight.add_(step, alpha=-rate)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return an approximation of the nearest orthogonal matrix: singular values between 0.7 and 1.2.

    Args:
        matrix: [rows, columns] bfloat16.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=_EPS)  # now the largest singular value is at most 1
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if tall else x


def _cost(shape: torch.Size) -> float:
    return math.prod(shape) * min(shape)
