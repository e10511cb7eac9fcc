"""From what a step computed to what each of its sequences gets: tokens, or the vector of a text."""

import logging

from torch import Tensor

from penstock.engine.answers import Drawn
from penstock.engine.drawing.prompt_logprobs import PromptLogprobs
from penstock.engine.drawing.sampler import Draws, Sampler, rows_of
from penstock.engine.drawing.verify import kept
from penstock.engine.runner import Output
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.step_plan import Share, StepPlan

log = logging.getLogger(__name__)


class Drawer:
    """Draws for all shares of a step at once.

    Args:
        sampler: draws for rows of logits.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._prompts = PromptLogprobs()

    def draw(self, plan: StepPlan, output: Output) -> list[Drawn]:
        """Return what each share of a plan gets."""
        draws = self._sampler.draw(self._prompts.take(plan, output.logits), rows_of(plan))
        is_plain = not (draws.failed or draws.refused or draws.logprobs)
        row = end = 0
        found: list[Drawn] = []
        for share in plan.shares:
            end += share.num_tokens
            if share.samples:
                rows = range(row, row + 1 + len(share.drafts))
                row = rows.stop
                if is_plain and not share.drafts:  # nearly always, so at once
                    found.append(Drawn(tokens=(draws.tokens[rows.start],)))
                else:
                    found.append(_drawn(share, draws, rows))
                found[-1].prompt_logprobs = self._prompts.told(share)
            elif share.embeds:
                found.append(Drawn(embedding=_unit(output.hidden[end - 1])))
            else:
                found.append(Drawn())
        return found

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""
        self._sampler.forget(sequence.id)
        self._prompts.forget(sequence)


def _drawn(share: Share, draws: Draws, own: range) -> Drawn:
    first = own[0]
    if first in draws.refused:
        return Drawn(error=draws.refused[first], is_refused=True)
    if first in draws.failed:
        log.warning("An answer failed request=%d reason=%s", share.sequence.request_id, draws.failed[first])
        return Drawn(error=draws.failed[first])
    barren = draws.failed.keys() | draws.refused.keys()
    tokens = kept(share.drafts, [draws.tokens[row] for row in own])
    sound = next((n for n, row in enumerate(own[: len(tokens)]) if row in barren), len(tokens))
    tokens = tokens[:sound]  # a row behind drafts that stood fails again when it is the first
    logprobs = [draws.logprobs[row] for row in own[: len(tokens)] if row in draws.logprobs]
    return Drawn(tokens=tuple(tokens), logprobs=tuple(logprobs))


def _unit(hidden: Tensor) -> tuple[float, ...]:
    vector = hidden.float()
    return tuple((vector / vector.norm()).tolist())
