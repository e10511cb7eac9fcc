"""Rotary position embeddings: frequencies, their published scalings, and the rotation.

Source: Su et al., "RoFormer", arXiv:2104.09864, in the half-split layout of Llama checkpoints
(dimension i pairs with i + head_dim / 2). The model keeps nothing between calls: the frequencies are
head_dim / 2 numbers, computed anew in each forward pass. A buffer would have to be rebuilt after construction
on the meta device, and `model.to(bfloat16)` would silently round it. Serving, whose steps take milliseconds,
keeps tables of positions outside the model (`RopeCache`).
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from penstock.nn.rope_scaling import RopeRule, RopeScaling

_FIRST_POSITIONS = 1024


def rope_tables(
    positions: Int[Tensor, "batch seq"],
    *,
    head_dim: int,
    rule: RopeRule,
    max_positions: int,
    longest_text: int,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "batch seq 1 head_dim"], Float[Tensor, "batch seq 1 head_dim"]]:
    """Return cosines and sines for each position, ready to broadcast over heads.

    Args:
        positions: index of each token within its document, from 0.
        rule: base, scaling, and part of a head that is rotated. Half of the rotated dimensions lie at its
            beginning and half at its middle; the others are multiplied by 1 and 0.
        max_positions: context length in tokens, read by the dynamic rule.
        longest_text: tokens of the longest text of a run or server, read by longrope.
        dtype: dtype of the result; the angles themselves are always float32.
    """
    with torch.no_grad():
        rotated = int(head_dim * rule.rotated)
        frequencies, factor = rope_frequencies(
            positions,
            head_dim=rotated,
            theta=rule.theta,
            scaling=rule.scaling,
            max_positions=max_positions,
            longest_text=longest_text,
        )
        angles = positions[..., None, None].float() * frequencies
        cosines, sines = angles.cos(), angles.sin()
        if factor != 1.0:
            cosines, sines = cosines * factor, sines * factor
        if rotated < head_dim:
            fixed = (0, (head_dim - rotated) // 2)
            cosines, sines = functional.pad(cosines, fixed, value=1.0), functional.pad(sines, fixed)
        cosines, sines = (torch.cat((table, table), dim=-1) for table in (cosines, sines))
        return cosines.to(dtype), sines.to(dtype)


def query_scales(
    positions: Int[Tensor, "batch seq"], scaling: RopeScaling, dtype: torch.dtype
) -> Float[Tensor, "batch seq 1 1"]:
    """Return factors on the rotated queries, which grow where positions are beyond the original context."""
    context, beta = scaling.original_max_position_embeddings, scaling.llama_4_scaling_beta
    assert context is not None and beta is not None, scaling  # noqa: PT018
    return (1 + beta * torch.log(1 + torch.floor(positions / context)))[..., None, None].to(dtype)


class RopeCache:
    """Cosines and sines of positions from 0 on, of several rules; the tables grow on demand.

    Args:
        make: from positions [1, n] to cosines and sines, each [rules, n, 1, head_dim], independent per
            position, and factors on queries, [1, n, 1, 1], or None.
        max_positions: upper bound on the length of the tables.
    """

    def __init__(
        self, make: Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]], *, max_positions: int
    ) -> None:
        self._make, self._max_positions = make, max_positions
        self._tables = make(
            torch.zeros(1, 1, dtype=torch.long)
        )  # one position: the dynamic rule takes their maximum, which an empty tensor lacks

    def up_to(
        self, position: int
    ) -> tuple[Float[Tensor, "rules n 1 head_dim"], Float[Tensor, "rules n 1 head_dim"], Tensor | None]:
        """Return tables that include `position`; when they grow, they double."""
        length = self._tables[0].shape[1]
        if position >= length:
            length = min(max(2 * length, position + 1, _FIRST_POSITIONS), self._max_positions)
            self._tables = self._make(torch.arange(length)[None])
        return self._tables


def rotate(
    x_blhd: Float[Tensor, "batch seq heads head_dim"],
    cosines: Float[Tensor, "batch seq 1 head_dim"],
    sines: Float[Tensor, "batch seq 1 head_dim"],
) -> Float[Tensor, "batch seq heads head_dim"]:
    """Rotate queries or keys by the angles of their positions."""
    first, second = x_blhd.chunk(2, dim=-1)
    return x_blhd * cosines + torch.cat((-second, first), dim=-1) * sines


def rope_frequencies(
    positions: Int[Tensor, "batch seq"],
    *,
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None,
    max_positions: int,
    longest_text: int,
) -> tuple[Float[Tensor, "half"], float]:
    """Return radians per position, [head_dim / 2] float32, and the factor on cosines and sines.

    Args:
        head_dim: dimensions that are rotated.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    if scaling is None:
        return 1.0 / (theta**exponents), 1.0
    if scaling.rope_type == "linear":
        return 1.0 / (theta**exponents) / scaling.factor, 1.0
    if scaling.rope_type == "ntk_alpha":
        assert scaling.alpha is not None, scaling
        return 1.0 / ((theta * scaling.alpha ** (head_dim / (head_dim - 2))) ** exponents), 1.0
    if scaling.rope_type == "dynamic":
        base = _dynamic_base(positions, head_dim, theta=theta, scaling=scaling, max_positions=max_positions)
        return 1.0 / (base**exponents), 1.0
    if scaling.rope_type == "llama3":
        return _llama3(1.0 / (theta**exponents), scaling), 1.0
    if scaling.rope_type == "longrope":
        return _longrope(theta**exponents, scaling, longest_text)
    return _yarn(theta**exponents, head_dim, theta=theta, scaling=scaling), _yarn_factor(scaling)


def _dynamic_base(
    positions: Tensor, head_dim: int, *, theta: float, scaling: RopeScaling, max_positions: int
) -> Tensor:
    # a tensor, not a number: reading the longest position would wait for the device
    length = (positions.max() + 1).clamp(min=max_positions)
    growth = scaling.factor * length / max_positions - (scaling.factor - 1)
    return theta * growth ** (head_dim / (head_dim - 2))


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    context = scaling.original_max_position_embeddings
    assert low is not None and high is not None and context is not None, scaling  # noqa: PT018
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / scaling.factor, frequencies)
    smooth = (context / wavelengths - low) / (high - low)
    mixed = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    is_between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return torch.where(is_between, mixed, scaled)


def _longrope(periods: Tensor, scaling: RopeScaling, longest_text: int) -> tuple[Tensor, float]:
    context = scaling.original_max_position_embeddings
    assert context is not None, scaling
    divisors = scaling.long_factor if longest_text > context else scaling.short_factor
    factor = scaling.attention_factor
    if factor is None:
        factor = math.sqrt(1 + math.log(scaling.factor) / math.log(context)) if scaling.factor > 1 else 1.0
    return 1.0 / (periods.new_tensor(divisors) * periods), factor


def _yarn(periods: Tensor, head_dim: int, *, theta: float, scaling: RopeScaling) -> Tensor:
    context = scaling.original_max_position_embeddings
    assert context is not None, scaling

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast or 32), dimension_of(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # no division by zero below
    index = torch.arange(head_dim // 2, dtype=torch.float32, device=periods.device)
    keep = 1 - ((index - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - keep) + 1.0 / periods * keep


def _yarn_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return temperature(1.0)
