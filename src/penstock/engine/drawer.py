"""From what a step computed to what each of its sequences gets: tokens, or the vector of a text."""

from collections.abc import Iterator

from torch import Tensor

from penstock.engine.answers import Drawn
from penstock.engine.runner import Output
from penstock.engine.sampler import Draws, Sampler, rows_of
from penstock.engine.sequence import Sequence
from penstock.engine.step_plan import Share, StepPlan
from penstock.engine.verify import kept


class Drawer:
    """Draws for all shares of a step at once.

    Args:
        sampler: draws for rows of logits.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def draw(self, plan: StepPlan, output: Output) -> list[Drawn]:
        """Return what each share of a plan gets."""
        draws = self._sampler.draw(output.logits, rows_of(plan))
        rows, end, found = iter(range(len(draws.tokens))), 0, []
        for share in plan.shares:
            end += share.num_tokens
            if share.samples:
                found.append(_drawn(share, draws, rows))
            elif _embeds(share):
                found.append(Drawn(embedding=_unit(output.hidden[end - 1])))
            else:
                found.append(Drawn())
        return found

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""
        self._sampler.forget(sequence.id)


def _drawn(share: Share, draws: Draws, rows: Iterator[int]) -> Drawn:
    own = [next(rows) for _ in range(1 + len(share.drafts))]
    if own[0] in draws.failed:
        return Drawn(error=draws.failed[own[0]])
    tokens = kept(share.drafts, [draws.tokens[row] for row in own])
    sound = next((n for n, row in enumerate(own[: len(tokens)]) if row in draws.failed), len(tokens))
    tokens = tokens[:sound]  # a row behind drafts that stood fails again when it is the first
    logprobs = [draws.logprobs[row] for row in own[: len(tokens)] if row in draws.logprobs]
    return Drawn(tokens=tuple(tokens), logprobs=tuple(logprobs))


def _embeds(share: Share) -> bool:
    """Whether a prompt is done of which one vector is wanted."""
    sequence = share.sequence
    return sequence.request.task == "embed" and share.start + share.num_tokens >= len(sequence.tokens)


def _unit(hidden: Tensor) -> tuple[float, ...]:
    vector = hidden.float()
    return tuple((vector / vector.norm()).tolist())
