"""Root mean square normalisation (Zhang and Sennrich, arXiv:1910.07467)."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from penstock.nn.kinds import SCALE, ZERO_CENTERED_SCALE, ParameterKind


class RMSNorm(nn.Module):
    """Scale each vector to root mean square 1, then by a learned weight; computed in float32 at least.

    Args:
        is_zero_centered: the weight is stored less 1 (Gemma), and 1 is added in the precision of the norm.
    """

    def __init__(self, size: int, *, eps: float, is_zero_centered: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if is_zero_centered else torch.ones(size))
        self.eps = eps
        self.is_zero_centered = is_zero_centered

    @property
    def shift(self) -> float:
        """Number that is added to the weight."""
        return 1.0 if self.is_zero_centered else 0.0

    def kinds(self) -> Mapping[str, ParameterKind]:
        """Return the kind of the weight."""
        return {"weight": ZERO_CENTERED_SCALE if self.is_zero_centered else SCALE}

    def forward(self, x: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        """Normalise over the last dim."""
        return self.normalise(x, self.weight)

    def normalise(self, x: Float[Tensor, "... size"], weight: Tensor) -> Float[Tensor, "... size"]:
        """Normalise over the last dim, with a weight in place of the norm's own."""
        if not self.is_zero_centered:
            return functional.rms_norm(x, weight.shape, weight, self.eps)
        exact = _wide(x)
        return functional.rms_norm(exact, weight.shape, 1 + weight.to(exact.dtype), self.eps).to(x.dtype)

    def normalise_part(
        self, x: Float[Tensor, "... part"], mean_square: Float[Tensor, "... 1"]
    ) -> Float[Tensor, "... part"]:
        """Normalise a rank's part of vectors, given the mean squares of the whole vectors."""
        exact = _wide(x) * torch.rsqrt(mean_square + self.eps)
        return (exact * (self.shift + self.weight_of_part().to(exact.dtype))).to(x.dtype)

    def weight_of_part(self) -> Tensor:
        """Return the weight of the part of a vector that this rank has."""
        return self.weight


def mean_square_of(x: Float[Tensor, "... size"]) -> Float[Tensor, "... 1"]:
    """Return the mean squares over the last dim, in float32 at least."""
    return _wide(x).square().mean(-1, keepdim=True)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
