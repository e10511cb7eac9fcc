"""Sampled tokens on the device, where the next step reads them; the host reads them later.

    step n      samples -> one half of a table        -> pinned memory, on a stream of its own -> host
    step n + 1  token ids <- that half;  samples -> the other half

The host launches step n + 2 once it has read step n, so a half is copied before it is written again, and no
stream waits for a copy. On a CPU a step has computed when it returns, and the same table gives its ids.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from penstock.devices import accelerator
from penstock.engine.model_runner.batch import StepBatch
from penstock.nn.upload import pinned


class DrawnTokens:
    """Sampled tokens of the last two steps that sampled.

    Args:
        most: rows of the largest step.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self.most = most
        self.table = torch.zeros(2 * most + 1, dtype=torch.int64, device=device)
        """Two halves, and a 0."""
        self._first = 0  # of the half that was written last
        self._aside = torch.Stream(device) if accelerator.is_accelerator(device) else None

    def split(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids that are known, and the places in the table of those that are not; for the others 0,
        and the place of the 0."""
        is_unread = ids < 0
        return np.where(is_unread, 0, ids), np.where(is_unread, self._first + ~ids, 2 * self.most)

    def ids(self, known: Int64[Tensor, "t"], places: Int64[Tensor, "t"]) -> Int64[Tensor, "t"]:
        """Return the token ids of `split`'s two arrays. After logits that were not finite an id is 0: there
        is no such token, and its answer has ended."""
        return self.table.index_select(0, places).add_(known).clamp_(min=0)

    def resolved(self, batch: StepBatch) -> tuple[StepBatch, np.ndarray | None]:
        """Return a step with known ids alone, on a CPU all of them; and the places of `split`, if any is
        left."""
        if not (batch.token_ids < 0).any():
            return batch, None
        known, places = self.split(batch.token_ids)
        if self._aside is None:
            ids = self.ids(torch.from_numpy(known), torch.from_numpy(places)).numpy()
            return replace(batch, token_ids=ids), None
        return replace(batch, token_ids=known), places

    def turn(self) -> int:
        """Begin to write the other half; return its first place."""
        self._first = self.most - self._first
        return self._first

    def keep(self, tokens: Int64[Tensor, "r"]) -> Callable[[], list[int]]:
        """Write the tokens of a step; return what `read` does."""
        first = self.turn()
        self.table[first : first + len(tokens)] = tokens
        return self.read(len(tokens))

    def read(self, count: int) -> Callable[[], list[int]]:
        """Start the copy of the last step's tokens to the host; return a function that waits for it."""
        tokens = self.table[self._first : self._first + count]
        if self._aside is None:
            return tokens.clone().tolist
        there = pinned(8 * count, tokens.device).view(torch.int64)
        self._aside.wait_stream(torch.accelerator.current_stream(tokens.device))
        with self._aside:
            there.copy_(tokens, non_blocking=True)
        return _Arriving(there, self._aside.record_event())


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Tokens on their way to the host."""

    tokens: Int64[Tensor, "r"]
    arrived: torch.Event

    def __call__(self) -> list[int]:
        """Wait for the tokens."""
        self.arrived.synchronize()
        found: list[int] = self.tokens.tolist()
        return found
