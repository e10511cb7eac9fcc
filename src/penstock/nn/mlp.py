"""The gated feed-forward layer, SwiGLU (Shazeer, arXiv:2002.05202)."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        """Apply the layer to each token."""
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out
