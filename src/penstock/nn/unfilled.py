"""Modules whose parameters have shapes and no values yet; a checkpoint or nn/init.py fills them.

torch samples initial values for tensors on the meta device too. They are never used, but sampling from a
normal distribution there loads torch's compiler: half a second of the 1.9 s that opening a small model takes.
So does `to_empty`, whose operator for the meta device is written in Python over symbolic shapes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.nn.dtensor import is_dtensor

Model = TypeVar("Model", bound=nn.Module)


@contextmanager
def unfilled() -> Iterator[None]:
    """Create modules on the meta device, without initial values.

    >>> with unfilled():
    ...     layer = torch.nn.Embedding(2, 3)
    >>> layer.weight.device.type, tuple(layer.weight.shape)
    ('meta', (2, 3))
    """
    with torch.device("meta"), _NoValues():
        yield


def on_device(model: Model, device: torch.device | str = "cpu") -> Model:
    """Move an unfilled model to a device, in place, and return it; its values are whatever is in memory.

    >>> with unfilled():
    ...     layer = torch.nn.Linear(2, 3)
    >>> on_device(layer).weight.device.type, tuple(layer.weight.shape)
    ('cpu', (3, 2))
    """

    def empty(tensor: Tensor) -> Tensor:
        if is_dtensor(tensor):
            return torch.empty_like(tensor, device=device)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    model._apply(empty)  # type: ignore[no-untyped-call]
    return model


class _NoValues(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # Any: whatever the function takes and returns
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))
