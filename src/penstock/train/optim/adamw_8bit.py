"""8-bit AdamW: both moments in 8 bits, a quarter of the memory (Dettmers et al., ICLR 2022).

A matrix's moments are stored as codes with a scale per block; a few rows at a time are decoded to float32,
updated, and encoded again. The step itself uses the moments before encoding. Vectors and small matrices keep
float32 moments, as in the paper's code: they cost nothing and are the most sensitive.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.nn.dtensor import detached_local
from penstock.nn.linear.rounding import code_of_zero, from_codes, num_blocks, to_codes
from penstock.parallel.slices import like
from penstock.train.optim import adamw
from penstock.train.optim.rule import ParamGroup, States, Update, divided
from penstock.train.recipe.optim_config import BLOCK, SMALLEST, fits_blocks

_OPEN_ON_CPU = 2**18  # numbers decoded at a time: their temporaries fit the processor's cache
_OPEN_ON_GPU = 2**24  # few kernel launches, for half a gigabyte


def init(parameter: Tensor) -> States:
    """Return codes and scales of zero moments; float32 moments for small parameters."""
    if parameter.ndim != 2 or parameter.numel() < SMALLEST:
        return adamw.init(parameter)
    here, (rows, columns) = detached_local(parameter), parameter.shape
    assert fits_blocks(here.shape[1], whole=columns, rows=rows), (here.shape, parameter.shape)
    shape = (rows, num_blocks(columns, BLOCK))
    states = {"step": torch.zeros(())}  # on the CPU, where it is read
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        states[f"{name}_codes"] = torch.full_like(parameter, code_of_zero(signed=signed), dtype=torch.uint8)
        scales = here.new_zeros((here.shape[0], num_blocks(here.shape[1], BLOCK)), dtype=torch.float32)
        states[f"{name}_scales"] = like(parameter, scales, shape)
    return states


def update(updates: Sequence[Update], group: ParamGroup, divisor: Tensor | None) -> None:
    """Take one AdamW step; small parameters in float32."""
    adamw.update([one for one in updates if "exp_avg_scales" not in one.states], group, divisor)
    for one in updates:
        if "exp_avg_scales" in one.states:
            _update_coded(one, group, divisor)


def _update_coded(one: Update, group: ParamGroup, divisor: Tensor | None) -> None:
    one.states["step"] += 1
    step = one.states["step"].item()
    codes = {name: detached_local(one.states[name]) for name in one.states if name != "step"}
    at_once = _OPEN_ON_CPU if one.weight.device.type == "cpu" else _OPEN_ON_GPU
    rows = max(1, at_once // one.weight.shape[1])
    for first in range(0, one.weight.shape[0], rows):
        some = slice(first, first + rows)
        part = {name: state[some] for name, state in codes.items()}
        _move(one.weight[some], divided(one.gradient[some], divisor), part, step=step, group=group)


def _move(weight: Tensor, gradient: Tensor, codes: States, *, step: float, group: ParamGroup) -> None:
    """Algorithm 2 of Loshchilov and Hutter, on a few rows."""
    beta1, beta2 = group["betas"]
    first = _opened(codes, "exp_avg", signed=True).lerp_(gradient, 1 - beta1)
    second = (
        _opened(codes, "exp_avg_sq", signed=False).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    )
    _code(codes, "exp_avg", first, signed=True)
    _code(codes, "exp_avg_sq", second, signed=False)
    size = second.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.addcdiv_(first, size, value=-group["lr"] / (1 - beta1**step))


def _opened(codes: States, name: str, *, signed: bool) -> Tensor:
    return from_codes(codes[f"{name}_codes"], codes[f"{name}_scales"], block=BLOCK, signed=signed)


def _code(codes: States, name: str, values: Tensor, *, signed: bool) -> None:
    new, scales = to_codes(values, block=BLOCK, signed=signed)
    codes[f"{name}_codes"].copy_(new)
    codes[f"{name}_scales"].copy_(scales)
