"""Random adapters of an output matrix [50, 6] in float64, and what PEFT's rules make of them."""

import torch
from torch import Tensor

from penstock.nn.linear.lora import Adapter


def drawn_adapter(*, has_magnitudes: bool) -> Adapter:
    """Return an adapter of rank 3 whose parameters want gradients."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    return Adapter(drawn(3, 6), drawn(50, 3), 1.7, drawn(50) if has_magnitudes else None)


def adapted(hidden: Tensor, weight: Tensor, adapter: Adapter) -> Tensor:
    """Return the outputs of the adapted matrix, [tokens, 50], in plain torch."""
    matrix = weight + adapter.scale * adapter.b @ adapter.a
    if adapter.magnitude is None:
        return hidden @ matrix.T
    return hidden @ matrix.T * (adapter.magnitude / matrix.detach().norm(dim=1))
