"""Modules whose parameters have shapes and no values yet; a checkpoint or nn/init.py fills them.

torch samples initial values for tensors on the meta device too. They are never used, but sampling from a
normal distribution there loads torch's compiler: half a second of the 1.9 s that opening a small model takes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


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


class _NoValues(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # Any: whatever the function takes and returns
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))
