"""The keys and values a model has computed, kept so that each new token costs one position.

Room is doubled when it runs out: reserving a model's whole context at once would take 16 GiB for an
8-billion-parameter Llama of 131,072 positions, of which a short answer needs a few MiB.
"""

import torch
from jaxtyping import Float
from torch import Tensor

FIRST_ROOM = 256
"""Positions reserved at first, unless the first append needs more."""


class LayerKV:
    """Keys and values of one layer, [batch, heads, positions, head_dim]; written in place."""

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._length = 0

    def append(
        self,
        k_bkld: Float[Tensor, "batch heads new head_dim"],
        v_bkld: Float[Tensor, "batch heads new head_dim"],
    ) -> tuple[Float[Tensor, "batch heads all head_dim"], Float[Tensor, "batch heads all head_dim"]]:
        """Add positions; return views of all so far, valid until the next append."""
        start, self._length = self._length, self._length + k_bkld.shape[2]
        self._keys = _with_room(self._keys, k_bkld, used=start, needed=self._length)
        self._values = _with_room(self._values, v_bkld, used=start, needed=self._length)
        self._keys[:, :, start : self._length] = k_bkld
        self._values[:, :, start : self._length] = v_bkld
        return self._keys[:, :, : self._length], self._values[:, :, : self._length]


class KVCache:
    """One `LayerKV` per block of a model; every row of the batch has the same length."""

    def __init__(self, num_layers: int) -> None:
        self.layers = [LayerKV() for _ in range(num_layers)]
        self.length = 0

    def advance(self, num_positions: int) -> None:
        """Count positions that every layer has appended."""
        self.length += num_positions


def _with_room(held: Tensor | None, like: Tensor, *, used: int, needed: int) -> Tensor:
    if held is not None and held.shape[2] >= needed:
        return held
    room = FIRST_ROOM if held is None else held.shape[2]
    while room < needed:
        room *= 2
    batch, heads, _, head_dim = like.shape
    larger = torch.empty((batch, heads, room, head_dim), dtype=like.dtype, device=like.device)
    if held is not None:
        larger[:, :, :used] = held[:, :, :used]
    return larger
