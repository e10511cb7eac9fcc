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
    """Watches the storages that operators return, from entry to exit; also those that FSDP empties and fills.

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
        """Most alive at one time, since entry or `reset`."""
        self.largest = 0
        """Of one storage."""
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def reset(self) -> None:
        """Forget the peak so far."""
        self._measure()
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # Any: whatever the operator takes and returns
        before = {_storage(t)._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if (
                isinstance(tensor, torch.Tensor)
                and _storage(tensor)._cdata not in before | self._known.keys()
            ):
                self._watch(_storage(tensor))
        self._measure()
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._known[key] = weakref.ref(storage), 0
        weakref.finalize(storage, self._gone, key)

    def _measure(self) -> None:
        """Look at every storage: resizing one is no operator."""
        for key, (known, size) in list(self._known.items()):
            storage = known()
            if storage is not None and (new := storage.nbytes()) != size:
                self._known[key] = known, new
                self.now += new - size
                self.largest = max(self.largest, new)
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        _, size = self._known.pop(key)
        self.now -= size


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of what this rank holds: that of a DTensor itself is of no size that counts."""
    held: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return held.untyped_storage()
