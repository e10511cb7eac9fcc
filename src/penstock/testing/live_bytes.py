"""Count the bytes of tensors alive while code runs: the peak of a step, its largest tensor; on any device.

Exact where the size of a process is not: what the allocator keeps, other threads and libraries do not count.
What an operator allocates inside itself is not seen.
"""

import weakref
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Watches the storages that operators return, from entry to exit.

    >>> with LiveBytes() as seen:
    ...     kept = torch.zeros(1000) + torch.zeros(1000)
    >>> seen.peak, seen.largest, seen.now
    (12000, 4000, 4000)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Alive, of those made since entry."""
        self.peak = 0
        """Most alive at one time."""
        self.largest = 0
        """Of one storage."""
        self._known: set[int] = set()

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # Any: whatever the operator takes and returns
        before = {_storage(t)._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and _storage(tensor)._cdata not in before | self._known:
                self._watch(_storage(tensor))
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
