"""DTensors: this rank's part of one, without loading `torch.distributed.tensor`.

That module takes a second to import. Where nothing has imported it, no tensor is a DTensor.
"""

import sys
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(tensor: Tensor) -> "TypeIs[DTensor]":
    """Return True if a tensor is a DTensor.

    >>> import torch
    >>> is_dtensor(torch.ones(2))
    False
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part as a plain tensor, with gradients."""
    return parameter.to_local() if is_dtensor(parameter) else parameter


def detached_local(tensor: Tensor) -> Tensor:
    """Return this rank's part, detached; writing to it writes to the tensor."""
    return local(tensor).detach()
