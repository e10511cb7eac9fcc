"""Root mean square normalisation (Zhang and Sennrich, arXiv:1910.07467)."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from penstock.nn.kinds import SCALE, ParameterKind


class RMSNorm(nn.Module):
    """Scale each vector to root mean square 1, then by a learned weight; computed in float32."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def kinds(self) -> Mapping[str, ParameterKind]:
        """Return the kind of the weight."""
        return {"weight": SCALE}

    def forward(self, x: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        """Normalise over the last dim."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
