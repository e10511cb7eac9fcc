"""What one step of the engine computes: the scheduler's whole output; no torch."""

from dataclasses import dataclass

from penstock.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A run of positions of one sequence."""

    sequence: Sequence
    start: int
    """First position computed; those before it are in the sequence's blocks."""
    num_tokens: int
    """Positions computed, drafts included; the sequence's blocks have room for all of them."""
    drafts: tuple[int, ...] = ()
    """Guessed tokens at the end of the run: positions len(tokens) and on."""

    @property
    def samples(self) -> bool:
        """Whether the run reaches the last known token and the next one is to be drawn; ask before commit."""
        reaches_end = self.start + self.num_tokens >= len(self.sequence.tokens)
        return reaches_end and self.sequence.request.task == "generate"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Shares of single tokens come first: attention treats them alike."""

    shares: tuple[Share, ...]
    expired: tuple[Sequence, ...] = ()
    """Sequences that ended because their time was over; they have no share."""

    @property
    def num_tokens(self) -> int:
        """Positions computed in the step."""
        return sum(share.num_tokens for share in self.shares)
