"""A small model keeps pace with a large one block for block, whatever the scheduler does."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.model_runner.batch import batch_of
from penstock.engine.request import Request
from penstock.engine.scheduling.blocks import BlockPool
from penstock.engine.scheduling.scheduler import Scheduler, StepLimits
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.speculation.draft_model import ModelDrafter, num_spare_blocks
from penstock.engine.speculation.speculation import CompletedStep, accepted_tokens
from tests.examples import examples

VOCAB = 7


def next_token(tokens):
    return hash(tuple(tokens)) % VOCAB


class SmallModel:
    """Knows of a text only what lies in its pages: the tokens that it was run on, slot by slot."""

    def __init__(self, *, num_blocks, block_size):
        self.pages = np.full((num_blocks, block_size), -1)
        self.block_size = block_size

    def logits(self, batch):
        self.pages.reshape(-1)[batch.slots] = batch.token_ids
        rows = []
        for row in batch.logit_rows:
            share = int(np.searchsorted(batch.query_starts, row, side="right")) - 1
            text = self.pages[batch.block_tables[share]].reshape(-1)[: batch.positions[row] + 1]
            rows.append(next_token(text.tolist()))
        sizes = np.diff(batch.query_starts)
        assert (sizes[: batch.num_singles] == 1).all()
        return torch.nn.functional.one_hot(torch.tensor(rows), VOCAB + 2).float()  # knows two tokens more


PROMPTS = st.lists(st.integers(min_value=0, max_value=1), min_size=1, max_size=12)


@examples(150)
@given(
    prompts=st.lists(st.tuples(PROMPTS, st.integers(1, 14), st.integers(1, 2)), min_size=1, max_size=6),
    block_size=st.integers(min_value=1, max_value=5),
    spare=st.integers(min_value=0, max_value=12),
    tokens_per_step=st.integers(min_value=3, max_value=30),
    num_drafts=st.integers(min_value=1, max_value=6),
    arrivals=st.randoms(use_true_random=False),
)
def test_every_draft_of_an_equal_model_stands(
    prompts, block_size, spare, tokens_per_step, num_drafts, arrivals
):
    most = max(-(-(len(prompt) + room) // block_size) for prompt, room, _ in prompts)
    num_blocks = most + spare  # so few that sequences drive one another out
    scheduler = Scheduler(
        StepLimits(max_sequences=4, tokens_per_step=tokens_per_step, block_size=block_size),
        BlockPool(num_blocks),
    )
    extra = num_spare_blocks(num_drafts=num_drafts, block_size=block_size, max_sequences=4)
    small = SmallModel(num_blocks=num_blocks + extra, block_size=block_size)
    drafter = ModelDrafter(
        small.logits,
        num_blocks=num_blocks,
        block_size=block_size,
        vocab_size=VOCAB,
        context=1000,
        num_drafts=num_drafts,
    )
    waiting = [
        Sequence(
            id=10 * number + answer,
            request_id=number,
            answer=answer,
            request=Request(prompt=tuple(prompt), max_tokens=room, num_answers=answers),
            tokens=list(prompt),
        )
        for number, (prompt, room, answers) in enumerate(prompts)
        for answer in range(answers)
    ]
    everything = list(waiting)
    while waiting or scheduler.has_work:
        while waiting and (not scheduler.has_work or arrivals.random() < 0.3):
            scheduler.add(waiting.pop(0))
        step(scheduler, drafter, block_size=block_size, num_drafts=num_drafts)
        scheduler.check()
    for sequence in everything:
        assert len(sequence.tokens) == sequence.num_prompt + sequence.request.max_tokens
        for end in range(sequence.num_prompt, len(sequence.tokens)):
            assert sequence.tokens[end] == next_token(sequence.tokens[:end])


def step(scheduler, drafter, *, block_size, num_drafts):
    plan = scheduler.schedule(0.0)
    batch = batch_of(plan, block_size)
    sampled = []
    for share in plan.shares:
        texts = [share.sequence.tokens + list(share.drafts[:end]) for end in range(len(share.drafts) + 1)]
        new = accepted_tokens(share.drafts, [next_token(text) for text in texts]) if share.samples else []
        assert len(new) == 1 + len(share.drafts) or not share.samples, "a draft of an equal model fell"
        sampled.append(new)
    scheduler.commit(plan, [new for share, new in zip(plan.shares, sampled, strict=True) if share.samples])
    wanted = []
    for share, new in zip(plan.shares, sampled, strict=True):
        room = share.sequence.request.max_tokens - share.sequence.num_sampled
        if new and not room:
            scheduler.finish(share.sequence, "length")
        wanted.append(min(num_drafts, max(0, room - 1)) if new else 0)
    done = CompletedStep(plan=plan, batch=batch, hidden=torch.zeros(0), sampled=sampled, model_s=1.0)
    for share, drafts, num in zip(plan.shares, drafter.propose(done, wanted), wanted, strict=True):
        assert len(drafts) == num
        if num:
            share.sequence.drafts = drafts
