"""Linear layers that read the same input, computed as one product.

Query, key and value, or gate and up, are separate parameters in training and on disk. In serving one matrix
with the rows of all of them is read in one sweep, and one call is made where there were three. The parts keep
their names, so that an adapter or a slice for one rank finds the rows that are its own.

Merge before matrices are packed or quantised: those steps replace `MergedLinear.linear`, as they replace any
`nn.Linear` of a model, and the names stay.
"""

from collections.abc import Mapping
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor, nn


class MergedLinear(nn.Module):
    """One linear layer whose outputs are those of several, one after the other.

    Args:
        linear: from the shared input to all outputs; may be replaced by a layer that computes the same.
        parts: name and number of outputs of each layer, in the order of the rows.
    """

    def __init__(self, linear: nn.Module, parts: tuple[tuple[str, int], ...]) -> None:
        super().__init__()
        self.linear = linear
        self.parts = parts
        self._sizes = [rows for _, rows in parts]

    @classmethod
    def of(cls, layers: Mapping[str, nn.Linear]) -> Self:
        """Merge layers; weights are copied, and a part without bias gets zeros where another has one."""
        weights = [layer.weight.detach() for layer in layers.values()]
        biases = [layer.bias for layer in layers.values()]
        num_outputs = sum(len(weight) for weight in weights)
        linear = nn.Linear(weights[0].shape[1], num_outputs, bias=False, device="meta")
        linear.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
        if any(bias is not None for bias in biases):
            whole = [
                weight.new_zeros(len(weight)) if bias is None else bias.detach()
                for weight, bias in zip(weights, biases, strict=True)
            ]
            linear.bias = nn.Parameter(torch.cat(whole), requires_grad=False)
        return cls(linear, tuple((name, len(w)) for name, w in zip(layers, weights, strict=True)))

    def rows(self, name: str) -> range:
        """Return which outputs belong to the layer of that name.

        >>> MergedLinear(nn.Identity(), (("query", 4), ("key", 2))).rows("key")
        range(4, 6)
        """
        start = 0
        for part, size in self.parts:
            if part == name:
                return range(start, start + size)
            start += size
        raise KeyError(name)

    def split(self, out: Float[Tensor, "... outputs"]) -> tuple[Tensor, ...]:
        """Return each part's outputs, as views of what `forward` returned."""
        return torch.split(out, self._sizes, dim=-1)

    def forward(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Return the outputs of all parts in one tensor."""
        out: Tensor = self.linear(x)
        return out
