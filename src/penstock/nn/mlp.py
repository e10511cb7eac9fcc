"""The feed-forward layer, gated (SwiGLU, GeGLU: Shazeer, arXiv:2002.05202) or plain."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

Activation = Literal["silu", "gelu_tanh", "relu2"]


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)); without a gate, down(act(up(x)))."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        activation: Activation = "silu",
        is_gated: bool = True,
    ) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=bias) if is_gated else None
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        """Apply the layer to each token."""
        if self.gate is None:
            inner = activate(self.up(x), self.activation)
        else:
            inner = activate(self.gate(x), self.activation) * self.up(x)
        out: Tensor = self.down(inner)
        return out


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply an activation: SiLU, GELU by its approximation with tanh, or the square of ReLU."""
    if activation == "silu":
        return functional.silu(x)
    if activation == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    return functional.relu(x).square()
