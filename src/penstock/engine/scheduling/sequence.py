"""One answer in the making: its tokens, its blocks and how far it is computed; no torch."""

from array import array
from collections.abc import MutableSequence
from dataclasses import dataclass, field

from penstock.engine.request import Finish, Request


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Changed by the scheduler only; `tokens` is the prompt and what was drawn so far."""

    id: int
    """Ascending in the order of arrival."""
    request_id: int
    answer: int
    """Which of the request's answers, from 0."""
    request: Request
    tokens: list[int]
    num_computed: int = 0
    """Tokens whose keys and values are in `blocks`; less than `len(tokens)` while any is to be computed."""
    blocks: MutableSequence[int] = field(default_factory=lambda: array("i"))
    """Block i holds positions i * block_size to (i + 1) * block_size; int32, which numpy reads as it is."""
    num_left: int = 0
    """Blocks at the front that it gave back, since no later token sees them; their numbers in `blocks` say
    nothing any more, and nobody reads them."""
    drafts: tuple[int, ...] = ()
    """Tokens guessed to follow `tokens`, to be verified in the next step."""
    num_cached: int = 0
    """Tokens of the prompt that were found computed when it was first admitted."""
    admitted: bool = False
    """Whether it ran before; one that was pre-empted waits again, and is not charged again."""
    names: list[bytes] = field(default_factory=list)
    """What each of its full blocks holds, as far as anybody asked; see `engine.scheduling.prefix`."""
    finish: Finish | None = None

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def is_scored(self) -> bool:
        """Whether logits of all positions are wanted, to say how likely the prompt's tokens were."""
        return self.request.num_prompt_logprobs is not None and not self.num_drawn

    @property
    def num_drawn(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.num_prompt
