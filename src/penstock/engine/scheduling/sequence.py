"""A sequence: its tokens, blocks and progress; and the plan of one step; no torch."""

from array import array
from collections.abc import MutableSequence
from dataclasses import dataclass, field

from penstock.engine.request import Finish, Request


@dataclass(slots=True)
class BlockTable:
    """Blocks of a sequence in one cache group."""

    blocks: MutableSequence[int] = field(default_factory=lambda: array("i"))
    """Block i holds positions i * block_size to (i + 1) * block_size; int32, which numpy reads without a
    copy."""
    num_released: int = 0
    """Leading blocks that the sequence does not hold, because no later token attends to them; their entries
    in `blocks` are stale and are not read."""

    @property
    def held(self) -> MutableSequence[int]:
        """Blocks that the sequence holds."""
        return self.blocks[self.num_released :]


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """State of one sequence, changed by the scheduler only."""

    id: int
    """Ascending in order of arrival."""
    request_id: int
    answer: int
    """Index of the answer within its request, from 0."""
    request: Request
    tokens: list[int]
    """The prompt and the answer so far. The last one is negative while the host has not read it: ~r is the
    token that the step in flight samples in its row r."""
    num_computed: int = 0
    """Tokens whose keys and values are in the cache; always less than `len(tokens)` while running."""
    tables: tuple[BlockTable, ...] = ()
    """One for each cache group; none while waiting."""
    drafts: tuple[int, ...] = ()
    """Draft tokens after `tokens`, verified in the next step."""
    num_cached: int = 0
    """Prompt tokens taken from the prefix cache on first admission."""
    admitted: bool = False
    """True once admitted; a preempted sequence is admitted again but not charged again."""
    names: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks, as far as computed; see `engine.scheduling.blocks`."""
    finish: Finish | None = None

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def is_scored(self) -> bool:
        """True if logits of prompt positions are needed: for prompt log-probabilities, or to score."""
        request = self.request
        return request.task == "score" or (request.num_prompt_logprobs is not None and not self.num_sampled)

    @property
    def scored(self) -> range:
        """Positions whose logits are needed to score the prompt, if it `is_scored`."""
        if self.request.task == "score":
            longest = max(map(len, self.request.continuations), default=0)
            return range(self.num_prompt - longest, self.num_prompt)
        return range(self.num_prompt - 1)

    @property
    def num_sampled(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.num_prompt


@dataclass(slots=True, kw_only=True)  # not frozen: one per sequence and step, and freezing doubles its cost
class ScheduledTokens:
    """Consecutive positions of one sequence that a step computes: its share of the step."""

    sequence: Sequence
    start: int
    """First computed position; earlier ones are in the sequence's blocks."""
    num_tokens: int
    """Computed positions, drafts included; blocks are allocated for all of them."""
    reaches_end: bool
    """True if the share has the last token of the sequence."""
    drafts: tuple[int, ...] = ()
    """Draft tokens at the end of the share: positions len(tokens) and on."""

    @property
    def samples(self) -> bool:
        """True if the next token is sampled."""
        return self.reaches_end and self.sequence.request.task == "generate"

    @property
    def embeds(self) -> bool:
        """True if the share reaches the end of a text to embed."""
        return self.reaches_end and self.sequence.request.task == "embed"

    @property
    def ends_scoring(self) -> bool:
        """True if the share reaches the end of a text to score."""
        return self.reaches_end and self.sequence.request.task == "score"

    @property
    def num_rows(self) -> int:
        """Rows of logits to sample from: after the last known token and after each draft."""
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def scored(self) -> range:
        """Positions whose logits are needed to score the prompt. Valid before `Scheduler.advance`."""
        sequence = self.sequence
        if not sequence.is_scored:
            return range(0)
        wanted = sequence.scored
        return range(max(self.start, wanted.start), min(self.start + self.num_tokens, wanted.stop))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Shares of one step, and sequences that expired. Shares of one token come first, for attention
    kernels."""

    shares: tuple[ScheduledTokens, ...]
    expired: tuple[Sequence, ...] = ()
    """Sequences that ended at their deadline; they have no share."""

    @property
    def num_tokens(self) -> int:
        """Positions computed in the step."""
        return sum(share.num_tokens for share in self.shares)

    @property
    def has_prompts(self) -> bool:
        """True if the step has a prefill chunk."""
        return any(share.num_tokens > 1 + len(share.drafts) for share in self.shares)
