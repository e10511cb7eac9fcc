"""Drafts from heads on the model itself: no cache, no second model, one small product a draft."""

from collections.abc import Sequence as Many
from itertools import islice

import torch

from penstock.engine.drafts.drafter import Done
from penstock.engine.scheduling.sequence import Sequence
from penstock.models.speculator import Speculator


class HeadsDrafter:
    """Guesses from the hidden state that the last token was drawn from, and that token.

    Args:
        speculator: on the device and in the dtype of the model.
    """

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator

    @torch.inference_mode()
    def propose(self, done: Done, wanted: Many[int]) -> list[tuple[int, ...]]:
        """Return guesses; see `Drafter`."""
        chosen = [index for index, num in enumerate(wanted) if num]
        if not chosen:
            return [()] * len(wanted)
        starts, num_kept, device = done.batch.query_starts, done.num_kept, done.hidden.device
        rows = torch.tensor([int(starts[i]) + num_kept[i] - 1 for i in chosen], device=device)
        tokens = torch.tensor([done.drawn[i][-1] for i in chosen], device=device)
        guesses = self._speculator.guesses(done.hidden[rows], tokens, num=max(wanted))
        found = iter(guesses.tolist())
        return [tuple(islice(next(found), num)) if num else () for num in wanted]

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept of a sequence."""
