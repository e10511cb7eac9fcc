"""AdamW: torch's fused kernel, on each rank's shards."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from penstock.nn.dtensor import detached_local
from penstock.train.optim.rule import ParamGroup, States, Update


def init(parameter: Tensor) -> States:
    """Return zero moments and the step count."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=detached_local(parameter).device),
        "exp_avg": torch.zeros_like(parameter, dtype=torch.float32),
        "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32),
    }


def update(updates: Sequence[Update], group: ParamGroup, divisor: Tensor | None) -> None:
    """Take one AdamW step for all parameters at once; the kernel divides the gradients, in place."""
    beta1, beta2 = group["betas"]
    held = [one for one in updates if one.weight.numel()]  # a rank may hold no row of a small parameter
    for one in updates:
        if not one.weight.numel():
            one.states["step"] += 1
    if not held:
        return
    adamw(
        [one.weight for one in held],
        [one.gradient for one in held],
        [detached_local(one.states["exp_avg"]) for one in held],
        [detached_local(one.states["exp_avg_sq"]) for one in held],
        [],
        [one.states["step"] for one in held],
        fused=True,
        grad_scale=divisor,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
