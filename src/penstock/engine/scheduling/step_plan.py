"""What one step of the engine computes: the scheduler's whole output; no torch."""

from dataclasses import dataclass

from penstock.engine.scheduling.sequence import Sequence


@dataclass(slots=True, kw_only=True)  # not frozen: made per answer and step, and freezing doubles its price
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
        return self._reaches_end and self.sequence.request.task == "generate"

    @property
    def embeds(self) -> bool:
        """Whether the run reaches the end of a text of which one vector is wanted."""
        return self._reaches_end and self.sequence.request.task == "embed"

    @property
    def _reaches_end(self) -> bool:
        return self.start + self.num_tokens >= len(self.sequence.tokens)

    @property
    def num_rows(self) -> int:
        """Rows of logits from which tokens are drawn: after the last known token, and after each draft."""
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def scored(self) -> range:
        """Positions whose logits are wanted besides, to say how likely the prompt's tokens were."""
        sequence = self.sequence
        if not sequence.is_scored:
            return range(0)
        return range(self.start, min(self.start + self.num_tokens, sequence.num_prompt - 1))


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

    @property
    def has_prompts(self) -> bool:
        """Whether any share is more than a next token and drafts; ask before commit."""
        return any(share.num_tokens > 1 + len(share.drafts) for share in self.shares)
