"""Speculative decoding: request drafts for each sequence, and verify them.

A step computes the logits after a sequence's last token and after each of its drafts, as if the drafts before
were accepted. The random number of a position is a function of (seed, answer, position), so the token sampled
at a position is determined by its logits; a draft is accepted if it equals that token. The first rejected
draft also rejects those after it.

So an answer is token for token the answer without drafts, for every seed and any drafts. A draft x is
accepted with probability p(x), as in the rejection sampling of Leviathan et al. (arXiv:2211.17192) and Chen
et al. (arXiv:2302.01318) for deterministic drafts; that the drafter cannot change an answer is the coupling
of Daliri, Musco and Suresh (arXiv:2408.07978). Sampled drafts with rejection sampling would make a seed's
answer depend on the drafter.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.core import clock
from penstock.core.log import EventLog
from penstock.engine.model_runner.batch import StepBatch
from penstock.engine.scheduling.sequence import Sequence, StepPlan
from penstock.engine.speculation.draft_length import DraftLength
from penstock.engine.stats import EngineCounters

log = EventLog(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedStep:
    """A step after the forward pass and sampling."""

    plan: StepPlan
    batch: StepBatch
    """Input of the model. Its block tables stay valid, though sequences may have finished since."""
    hidden: Tensor
    """[t, hidden] normalised hidden states of the batch's tokens."""
    sampled: Many[Many[int]]
    """Per share: the tokens added to its sequence, the last of which is not computed yet; empty if the share
    did not sample."""
    model_s: float
    """Seconds of the forward pass and sampling."""

    @property
    def num_kept(self) -> list[int]:
        """Computed tokens of each share that are valid: all but the rejected drafts."""
        return [
            share.num_tokens - len(share.drafts) + max(0, len(sampled) - 1)
            for share, sampled in zip(self.plan.shares, self.sampled, strict=True)
        ]


class Drafter(Protocol):
    """Source of draft tokens; wrong drafts never change an answer."""

    def propose(self, done: CompletedStep, wanted: Many[int]) -> list[tuple[int, ...]]:
        """Return drafts of what follows the new last token of each share's sequence.

        Called after every step, also where no drafts are wanted.

        Args:
            wanted: maximum drafts per share; 0: none, for instance for finished sequences.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence."""
        ...


def known_tokens(tokens: Many[int], vocab_size: int) -> list[int]:
    """Return tokens for a drafter, which lacks those that an adapter adds: it reads token 0 instead.

    >>> known_tokens([5, 9, 8], 9)
    [5, 0, 8]
    """
    return [token if token < vocab_size else 0 for token in tokens]


class Speculation:
    """Requests drafts after each step and assigns them to sequences.

    Args:
        drafter: source of drafts.
        draft_length: number of drafts.
    """

    def __init__(self, drafter: Drafter, draft_length: DraftLength) -> None:
        self._drafter = drafter
        self._draft_length = draft_length
        self._failed = False

    def after(self, done: CompletedStep, counts: EngineCounters) -> None:
        """Draft for the next step, after the sequences of this one were extended or finished.

        Args:
            counts: drafts and accepted drafts are added to it.
        """
        self._settle(done, counts)
        if self._failed:
            return
        begin = clock.monotonic()
        try:
            found = self._drafter.propose(done, self._wanted(done))
        except Exception:  # answers need no drafts: decoding continues without
            log.exception("drafting_failed", "Drafting failed; decoding continues without drafts")
            self._failed = True
            return
        for share, drafts in zip(done.plan.shares, found, strict=True):
            share.sequence.drafts = drafts
        drafting_s = clock.monotonic() - begin
        counts.draft_s += drafting_s
        if all(share.num_tokens == 1 + len(share.drafts) for share in done.plan.shares):
            self._draft_length.record_step(
                done.model_s,
                num_tokens=done.plan.num_tokens,
                num_kept=sum(map(len, done.sampled)),
                drafting_s=drafting_s,
                num_drafts=sum(map(len, found)),
            )

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence."""
        self._drafter.forget(sequence)
        self._draft_length.forget(sequence)

    def _settle(self, done: CompletedStep, counts: EngineCounters) -> None:
        for share, tokens in zip(done.plan.shares, done.sampled, strict=True):
            if share.drafts and tokens:
                num_kept = len(tokens) - 1
                counts.drafts += len(share.drafts)
                counts.drafts_accepted += num_kept
                if share.sequence.finish is None:
                    self._draft_length.record(share.sequence, num_drafts=len(share.drafts), num_kept=num_kept)

    def _wanted(self, done: CompletedStep) -> list[int]:
        """Return the number of drafts per share; 0 for sequences that finished or did not sample."""
        going_on = [
            share.sequence
            for share, tokens in zip(done.plan.shares, done.sampled, strict=True)
            if tokens and share.sequence.finish is None
        ]
        nums = dict(zip((s.id for s in going_on), self._draft_length.wanted(going_on), strict=True))
        return [nums.get(share.sequence.id, 0) for share in done.plan.shares]


def accepted_tokens(drafts: Many[int], sampled: Many[int]) -> list[int]:
    """Return the tokens that a step adds to an answer: the accepted drafts, and one more.

    The caller cuts them at an end token or max_tokens.

    Args:
        drafts: [k] draft tokens.
        sampled: [k + 1] tokens sampled after each prefix of the drafts, the empty one first.

    >>> accepted_tokens([7, 8, 9], [7, 8, 4, 1])
    [7, 8, 4]
    """
    assert len(sampled) == len(drafts) + 1, (drafts, sampled)
    fell = next((i for i, token in enumerate(drafts) if token != sampled[i]), len(drafts))
    return list(sampled[: fell + 1])
