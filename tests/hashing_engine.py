"""A whole engine without a network: its tokens are hashes, see `hashing_model`."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from penstock.engine.engine import Engine
from penstock.engine.model_runner.batch import StepBatch
from penstock.engine.model_runner.capacity import Capacity
from penstock.engine.model_runner.drawn_tokens import DrawnTokens
from penstock.engine.model_runner.interface import StepOutput
from penstock.engine.outputs import SampledTokens
from penstock.engine.request import OutputDelta
from penstock.engine.sampling.sampler import Draws
from penstock.engine.scheduling.blocks import BlockPool
from penstock.engine.scheduling.scheduler import Scheduler, StepLimits
from penstock.engine.scheduling.sequence import ScheduledTokens, Sequence, StepPlan
from tests.hashing_model import ADAPTERS, VOCAB, HashingModel


class HashingRunner:
    """Runs the stand-in; `before` is called with every batch and may raise.

    Args:
        overlaps: keep sampled tokens as a device does: the next batch may name them by their rows, and the
            engine reads them when it wants to.
    """

    adapters = ADAPTERS
    num_new_tokens: ClassVar = {}

    def __init__(
        self, model: HashingModel, before: Callable[[StepBatch], None], *, overlaps: bool = False
    ) -> None:
        self._model = model
        self._drawn = DrawnTokens(8, torch.device("cpu")) if overlaps else None
        self._before = before
        self.closed = False
        self.tell_lost: Callable[[], None] = lambda: None
        self.lost: Exception | None = None

    def on_lost(self, call: Callable[[], None]) -> None:
        self.tell_lost = call

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost

    def run(
        self,
        batch: StepBatch,
        settings: Tensor | None = None,  # noqa: ARG002
        *,
        samples: bool = False,
    ) -> StepOutput:
        self._before(batch)
        if self._drawn is None:
            assert (batch.token_ids >= 0).all()
            return StepOutput(torch.empty(0), torch.tensor(self._model.run(batch)))
        batch, _ = self._drawn.resolved(batch)
        tokens = torch.tensor(self._model.run(batch), dtype=torch.int64)
        return StepOutput(torch.empty(0), tokens, drawn=self._drawn.keep(tokens) if samples else None)

    def close(self) -> None:
        self.closed = True


class HashDrawer:
    """The row of a share is its token; `instead` may put something else in its place.

    Steps with log-probabilities or embeddings are read at once, as those are computed on the host.
    """

    def __init__(self, instead: Callable[[ScheduledTokens], SampledTokens | None] = lambda _: None) -> None:
        self._instead = instead
        self.known: set[int] = set()

    def prepare(self, plan: StepPlan) -> Draws:
        self.known |= {share.sequence.id for share in plan.shares}
        wanted = (share.sequence.request.sampling.num_logprobs for share in plan.shares if share.samples)
        is_plain = all(number is None for number in wanted) and not any(share.embeds for share in plan.shares)
        return Draws(is_plain=is_plain)

    def draw(self, plan: StepPlan, output: StepOutput, draws: Draws) -> list[SampledTokens]:  # noqa: ARG002
        rows = iter(output.logits.tolist() if output.drawn is None else output.drawn())
        found = [
            SampledTokens(tokens=(next(rows),))
            if share.samples
            else SampledTokens(embedding=(1.0,) if share.embeds else None)
            for share in plan.shares
        ]
        return [self._instead(share) or new for share, new in zip(plan.shares, found, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        self.known.discard(sequence.id)


def hashing_engine(
    *,
    num_blocks: int = 64,
    before: Callable[[StepBatch], None] = lambda _: None,
    instead: Callable[[ScheduledTokens], SampledTokens | None] = lambda _: None,
    overlaps: bool = False,
) -> Engine:
    """An engine of blocks of 4 positions, 8 answers at once and 16 tokens a step."""
    scheduler = Scheduler(
        StepLimits(max_sequences=8, tokens_per_step=16, block_size=4), BlockPool(num_blocks)
    )
    capacity = Capacity(
        context=num_blocks * 4, vocab_size=VOCAB, num_blocks=num_blocks, block_size=4, tokens_per_step=16,
        max_sequences=8,
    )  # fmt: skip
    runner = HashingRunner(HashingModel(num_blocks=num_blocks, block_size=4), before, overlaps=overlaps)
    return Engine(
        runner, scheduler, token_sampler=HashDrawer(instead), capacity=capacity, text_processor=None
    )


def run_to_end(engine: Engine) -> list[OutputDelta]:
    """Step until nothing is left; return all pieces."""
    pieces = []
    while engine.has_work:
        pieces += engine.step()
        engine.scheduler.check()
    assert engine.stats().used_blocks == 0
    assert not engine._token_sampler.known
    return pieces


def tokens_of(pieces: list[OutputDelta], request_id: int, answer: int = 0) -> list[int]:
    """The tokens of one answer."""
    return [t for p in pieces if (p.request_id, p.answer) == (request_id, answer) for t in p.token_ids]
