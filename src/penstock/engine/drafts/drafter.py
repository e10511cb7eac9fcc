"""What every source of drafts is given after a step, and gives back."""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.engine.batch import Batch
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.step_plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A step that was computed, and drawn from."""

    plan: StepPlan
    batch: Batch
    """What the model was run on. Its blocks hold what they held, though sequences may have ended since."""
    hidden: Tensor
    """[t, c] the normalised residual stream of the batch's tokens."""
    drawn: Many[Many[int]]
    """Per share: the tokens it added to its sequence, the last of which is not computed yet; empty for a
    share that did not sample."""
    model_s: float
    """Seconds that computing and drawing took."""

    @property
    def num_kept(self) -> list[int]:
        """Tokens of each share that stand: all but the drafts that were not drawn."""
        return [
            share.num_tokens - len(share.drafts) + max(0, len(drawn) - 1)
            for share, drawn in zip(self.plan.shares, self.drawn, strict=True)
        ]


class Drafter(Protocol):
    """Guesses tokens; right or wrong, they never change an answer."""

    def propose(self, done: Done, wanted: Many[int]) -> list[tuple[int, ...]]:
        """Return guesses of what follows the new last token of each share's sequence.

        Called after every step, also where nothing is wanted: a drafter with a cache follows.

        Args:
            wanted: per share: how many tokens at most; 0: none, as of sequences that ended.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """Let go of what is kept of a sequence that ended."""
        ...
