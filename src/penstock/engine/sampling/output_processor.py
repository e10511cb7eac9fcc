"""Output processor: from the logits of a step to tokens, log-probabilities or embeddings of each sequence.

Sampling needs the logits of the last position only. Log-probabilities of a prompt need the logits of all its
positions: chunk length times vocabulary. A "score" task needs those of its continuations.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from penstock.core.log import EventLog
from penstock.engine.model_runner.interface import StepOutput
from penstock.engine.outputs import SampledTokens
from penstock.engine.request import ContinuationScore, TokenLogprob
from penstock.engine.sampling.sampler import (
    NOT_FINITE,
    Draws,
    Sampler,
    SamplerOutput,
    logprobs_of,
    rows_of,
)
from penstock.engine.scheduling.sequence import ScheduledTokens, Sequence, StepPlan
from penstock.engine.speculation.speculation import accepted_tokens

log = EventLog(__name__)


class OutputProcessor:
    """Samples for all shares of a step at once.

    Args:
        sampler: samples rows of logits.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._prompts = PromptLogprobs()
        self._scores = ContinuationScores()

    def prepare(self, plan: StepPlan) -> Draws:
        """Return what the tokens of a plan will be sampled by."""
        draws = self._sampler.prepare(rows_of(plan))
        if any(share.embeds or share.sequence.is_scored for share in plan.shares):
            return replace(draws, is_plain=False)
        return draws

    def draw(self, plan: StepPlan, output: StepOutput, draws: Draws) -> list[SampledTokens]:
        """Return the sampled tokens of each share of a plan, in order; before its counts change, unless the
        draws are plain."""
        self._scores.take(plan, output.logits)
        logits = self._prompts.take(plan, output.logits)
        drawn = output.drawn if logits is output.logits else None  # of all rows, those of prompts too
        return self._of_shares(plan, output, self._sampler.draw(logits, draws, drawn))

    def _of_shares(self, plan: StepPlan, output: StepOutput, draws: SamplerOutput) -> list[SampledTokens]:
        is_plain = not (draws.failed or draws.refused or draws.logprobs)
        row = end = 0
        found: list[SampledTokens] = []
        for share in plan.shares:
            end += share.num_tokens
            if share.samples:
                rows = range(row, row + 1 + len(share.drafts))
                row = rows.stop
                if is_plain and not share.drafts:  # the fast path, nearly always taken
                    found.append(SampledTokens(tokens=(draws.tokens[rows.start],)))
                else:
                    found.append(_drawn(share, draws, rows))
                found[-1].prompt_logprobs = self._prompts.told(share)
            elif share.embeds:
                found.append(SampledTokens(embedding=_unit(output.hidden[end - 1])))
            elif share.ends_scoring:
                found.append(self._scores.told(share.sequence))
            else:
                found.append(SampledTokens())
        return found

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence."""
        self._sampler.forget(sequence.id)
        self._prompts.forget(sequence)
        self._scores.forget(sequence)


def _drawn(share: ScheduledTokens, draws: SamplerOutput, own: range) -> SampledTokens:
    first = own[0]
    if first in draws.refused:
        return SampledTokens(error=draws.refused[first], is_refused=True)
    if first in draws.failed:
        log.warning(
            "answer_failed",
            "Request {request} failed: {reason}",
            request=share.sequence.request_id,
            reason=draws.failed[first],
        )
        return SampledTokens(error=draws.failed[first])
    barren = draws.failed.keys() | draws.refused.keys()
    tokens = accepted_tokens(share.drafts, [draws.tokens[row] for row in own])
    sound = next((n for n, row in enumerate(own[: len(tokens)]) if row in barren), len(tokens))
    tokens = tokens[:sound]  # a failing row after accepted drafts fails again as the first of the next step
    logprobs = [draws.logprobs[row] for row in own[: len(tokens)] if row in draws.logprobs]
    return SampledTokens(tokens=tuple(tokens), logprobs=tuple(logprobs))


def _unit(hidden: Tensor) -> tuple[float, ...]:
    vector = hidden.float()
    return tuple((vector / vector.norm()).tolist())


class PromptLogprobs:
    """Collects log-probabilities of prompts that are computed over several steps."""

    def __init__(self) -> None:
        self._found: dict[int, list[TokenLogprob | None]] = {}

    def take(self, plan: StepPlan, logits: Tensor) -> Tensor:
        """Consume the rows that score prompts; return the remaining rows, to sample from."""
        if not any(share.scored for share in plan.shares):
            return logits
        drawing: list[int] = []
        at = 0
        for share in plan.shares:
            end = at + len(share.scored)
            if share.scored and share.sequence.request.task != "score":
                self._add(share, logits[at:end])
            at = end + share.num_rows
            drawing += range(end, at)
        return logits[drawing]

    def told(self, share: ScheduledTokens) -> tuple[TokenLogprob | None, ...] | None:
        """Return the log-probabilities of the prompt with the first token of an answer, if requested."""
        sequence = share.sequence
        if sequence.request.num_prompt_logprobs is None or sequence.num_sampled:
            return None
        return tuple(self._found.pop(sequence.id, [None]))

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence."""
        self._found.pop(sequence.id, None)

    def _add(self, share: ScheduledTokens, logits: Tensor) -> None:
        request = share.sequence.request
        assert request.num_prompt_logprobs is not None
        found = self._found.setdefault(share.sequence.id, [None])  # the first token has no probability
        del found[share.start + 1 :]  # a preempted prompt starts again
        tokens = request.prompt[share.start + 1 : share.start + 1 + len(share.scored)]
        found += logprobs_of(logits, tokens, num_top=request.num_prompt_logprobs)


class ContinuationScores:
    """Scores of continuations, which may be computed over several steps."""

    def __init__(self) -> None:
        self._found: dict[int, dict[tuple[int, int], tuple[float, bool]]] = {}
        # sequence id -> (continuation, token) -> log-probability, and whether it is the likeliest token

    def take(self, plan: StepPlan, logits: Tensor) -> None:
        """Keep what the rows of a step tell; all rows at once, as a step has hundreds of continuations."""
        wanted = list(_wanted(plan))
        if not wanted:
            return
        rows = sorted({row for row, *_ in wanted})
        place = {row: index for index, row in enumerate(rows)}
        part = (logits if len(rows) == len(logits) else logits[rows]).float()
        at = torch.tensor([place[row] for row, *_ in wanted], device=part.device)
        tokens = torch.tensor([token for _, token, *_ in wanted], device=part.device)
        logprobs = part[at, tokens] - part.logsumexp(-1)[at]
        greedy = part.argmax(-1)[at] == tokens
        for (_, _, sequence, index), logprob, is_best in zip(
            wanted, logprobs.tolist(), greedy.tolist(), strict=True
        ):
            self._found.setdefault(sequence.id, {})[index] = logprob, is_best

    def told(self, sequence: Sequence) -> SampledTokens:
        """Return the scores of a sequence that is complete; an error if the model's logits are not finite."""
        found = self._found.pop(sequence.id, {})
        if any(math.isnan(logprob) for logprob, _ in found.values()):
            return SampledTokens(error=NOT_FINITE)
        each = [
            [found[number, index] for index in range(len(continuation))]
            for number, continuation in enumerate(sequence.request.continuations)
        ]
        return SampledTokens(
            scores=tuple(
                ContinuationScore(
                    logprob=sum(logprob for logprob, _ in tokens),
                    is_greedy=all(is_best for _, is_best in tokens),
                )
                for tokens in each
            )
        )

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence."""
        self._found.pop(sequence.id, None)


def _wanted(plan: StepPlan) -> Iterator[tuple[int, int, Sequence, tuple[int, int]]]:
    """Yield row of the logits, token, sequence, and (continuation, index in it) of all that is scored."""
    begin = 0
    for share in plan.shares:
        scored = share.scored
        sequence = share.sequence
        if scored and sequence.request.task == "score":
            for number, continuation in enumerate(sequence.request.continuations):
                first = sequence.num_prompt - len(continuation)
                for position in range(max(first, scored.start), scored.stop):
                    index = position - first
                    yield begin + position - scored.start, continuation[index], sequence, (number, index)
        begin += len(scored) + share.num_rows
