"""Host memory for what is being saved: copied into while training stands still, written while it goes on.

One buffer, as large as the rank's share, is kept for the whole run: memory is taken once and its pages are
touched once. Under CUDA it is pinned, so that the copy runs at the speed of the bus.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class Stage:
    """A recycled buffer."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Sequence[Tensor]) -> memoryview:
        """Copy tensors one after another, without gaps; return the bytes.

        They are whole when this returns, and valid until the next call.

        Args:
            tensors: of element sizes that do not grow, so that each is aligned.
        """
        needed = sum(tensor.nbytes for tensor in tensors)
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if len(self._buffer) < needed:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # give back before taking
            self._buffer = torch.empty(needed, dtype=torch.uint8, pin_memory=on_gpu)
        start = 0
        for tensor in tensors:
            room = self._buffer[start : start + tensor.nbytes]
            room.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            start += tensor.nbytes
        if on_gpu:
            torch.cuda.current_stream().synchronize()  # the next step changes what is being copied
        return self._buffer[:needed].numpy().data
