"""How likely the tokens of a prompt were, collected while it is computed chunk by chunk.

The logits of a position tell the next token, so those of a whole prompt are computed for it, where an answer
alone needs those of the last position: a step's chunk times the vocabulary.
"""

from torch import Tensor

from penstock.engine.drawing.logprobs import logprobs_of
from penstock.engine.request import TokenLogprob
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.step_plan import Share, StepPlan


class PromptLogprobs:
    """Keeps what is known of prompts that were asked about and are not done."""

    def __init__(self) -> None:
        self._found: dict[int, list[TokenLogprob | None]] = {}

    def take(self, plan: StepPlan, logits: Tensor) -> Tensor:
        """Take the rows of a step's logits that score prompts; return the others, which draw."""
        if not any(share.scored for share in plan.shares):
            return logits
        drawing: list[int] = []
        at = 0
        for share in plan.shares:
            end = at + len(share.scored)
            if share.scored:
                self._add(share, logits[at:end])
            at = end + share.num_rows
            drawing += range(end, at)
        return logits[drawing]

    def told(self, share: Share) -> tuple[TokenLogprob | None, ...] | None:
        """Return those of a whole prompt with its first drawn token, where they were asked for."""
        sequence = share.sequence
        if sequence.request.num_prompt_logprobs is None or sequence.num_drawn:
            return None
        return tuple(self._found.pop(sequence.id, [None]))

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""
        self._found.pop(sequence.id, None)

    def _add(self, share: Share, logits: Tensor) -> None:
        request = share.sequence.request
        assert request.num_prompt_logprobs is not None
        found = self._found.setdefault(share.sequence.id, [None])  # nothing comes before the first token
        del found[share.start + 1 :]  # a pre-empted prompt begins again
        tokens = request.prompt[share.start + 1 : share.start + 1 + len(share.scored)]
        found += logprobs_of(logits, tokens, num_top=request.num_prompt_logprobs)
