"""After each step: how many tokens to guess for each sequence, the guesses, and how the last ones fared."""

import logging

from penstock.core import clock
from penstock.engine.drafts.drafter import Done, Drafter
from penstock.engine.drafts.pace import Pace
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.stats import Counts

log = logging.getLogger(__name__)


class Drafting:
    """Puts drafts on sequences.

    Args:
        drafter: where they come from.
        pace: how many.
    """

    def __init__(self, drafter: Drafter, pace: Pace) -> None:
        self._drafter = drafter
        self._pace = pace
        self._failed = False

    def after(self, done: Done, counts: Counts) -> None:
        """Guess what follows, once the sequences of a step are longer and those that ended have ended.

        Args:
            counts: where drafts and those that stood are added.
        """
        self._settle(done, counts)
        if self._failed:
            return
        begin = clock.monotonic()
        try:
            found = self._drafter.propose(done, self._wanted(done))
        except Exception:  # answers need no drafts, and shall not end for want of them
            log.exception("Guessing tokens failed; answers go on without drafts")
            self._failed = True
            return
        for share, drafts in zip(done.plan.shares, found, strict=True):
            share.sequence.drafts = drafts
        drafting_s = clock.monotonic() - begin
        counts.draft_s += drafting_s
        if all(share.num_tokens == 1 + len(share.drafts) for share in done.plan.shares):
            self._pace.step_took(
                done.model_s,
                num_tokens=done.plan.num_tokens,
                num_kept=sum(map(len, done.drawn)),
                drafting_s=drafting_s,
                num_drafts=sum(map(len, found)),
            )

    def forget(self, sequence: Sequence) -> None:
        """Let go of a sequence that ended."""
        self._drafter.forget(sequence)
        self._pace.forget(sequence)

    def _settle(self, done: Done, counts: Counts) -> None:
        for share, tokens in zip(done.plan.shares, done.drawn, strict=True):
            if share.drafts and tokens:
                num_kept = len(tokens) - 1
                counts.drafts += len(share.drafts)
                counts.drafts_accepted += num_kept
                if share.sequence.finish is None:
                    self._pace.stood(share.sequence, num_drafts=len(share.drafts), num_kept=num_kept)

    def _wanted(self, done: Done) -> list[int]:
        """Return how many drafts each share's sequence is to have: none where it ended or did not sample."""
        going_on = [
            share.sequence
            for share, tokens in zip(done.plan.shares, done.drawn, strict=True)
            if tokens and share.sequence.finish is None
        ]
        nums = dict(zip((s.id for s in going_on), self._pace.wanted(going_on), strict=True))
        return [nums.get(share.sequence.id, 0) for share in done.plan.shares]
