"""A plan as arrays, written out by hand."""

import numpy as np

from penstock.engine.model_runner.batch import batch_of
from penstock.engine.request import Request
from penstock.engine.scheduling.sequence import BlockTable, ScheduledTokens, Sequence, StepPlan


def share_of(tokens, start, num_tokens, *, blocks, more_blocks=None, drafts=(), num_prompt=None, **request):
    prompt = tuple(tokens[: num_prompt or len(tokens)])
    sequence = Sequence(
        id=0,
        request_id=0,
        answer=0,
        request=Request(prompt=prompt, max_tokens=9, **request),
        tokens=list(tokens),
        num_computed=start,
        tables=tuple(
            BlockTable(list(each)) for each in ([blocks] if more_blocks is None else [blocks, more_blocks])
        ),
    )
    return ScheduledTokens(
        sequence=sequence,
        start=start,
        num_tokens=num_tokens,
        reaches_end=start + num_tokens >= len(tokens),
        drafts=drafts,
    )


DECODE = share_of([10, 11, 12, 13, 14], 4, 1, blocks=[7, 2], num_prompt=2)
DRAFTED = share_of([20, 21, 22], 2, 3, blocks=[5, 1], drafts=(23, 24), adapter="a")
CHUNK = share_of(range(30, 50), 3, 4, blocks=[3, 4, 6, 8, 9])
PROMPT = share_of([60, 61], 0, 2, blocks=[0], task="embed")


def test_a_step_of_all_kinds():
    plan = StepPlan(shares=(DECODE, DRAFTED, CHUNK, PROMPT))
    batch = batch_of(plan, 4, adapters={"a": 3})
    assert batch.token_ids.tolist() == [14, 22, 23, 24, 33, 34, 35, 36, 60, 61]
    assert batch.positions.tolist() == [4, 2, 3, 4, 3, 4, 5, 6, 0, 1]
    assert batch.slots.tolist() == [[8, 22, 23, 4, 15, 16, 17, 18, 0, 1]]
    assert batch.query_starts.tolist() == [0, 1, 4, 8, 10]
    assert batch.lengths.tolist() == [5, 5, 7, 2]
    assert batch.block_tables.tolist() == [[[7, 2, 0, 0, 0], [5, 1, 0, 0, 0], [3, 4, 6, 8, 9], [0] * 5]]
    assert batch.logit_rows.tolist() == [0, 1, 2, 3]
    assert batch.adapters.tolist() == [-1, 3, -1, -1]
    assert batch.num_singles == 1


def test_each_cache_group_has_slots_and_tables_of_its_own():
    long = share_of(range(30, 50), 3, 3, blocks=[3, 4, 6, 8, 9], more_blocks=[5, 2])
    batch = batch_of(StepPlan(shares=(share_of([1, 2], 1, 1, blocks=[0], more_blocks=[7]), long)), 4)
    assert batch.slots.tolist() == [[1, 15, 16, 17], [29, 23, 8, 9]]
    assert batch.block_tables.tolist() == [[[0] * 5, [3, 4, 6, 8, 9]], [[7, 0, 0, 0, 0], [5, 2, 0, 0, 0]]]


def test_dtypes_are_those_the_kernels_read():
    batch = batch_of(StepPlan(shares=(DECODE,)), 4)
    for name, dtype in {
        "token_ids": np.int64, "positions": np.int64, "slots": np.int64, "logit_rows": np.int64,
        "query_starts": np.int32, "lengths": np.int32, "block_tables": np.int32, "adapters": np.int32,
    }.items():  # fmt: skip
        array = getattr(batch, name)
        assert array.dtype == dtype, name
        assert array.flags.c_contiguous, name


def test_rows_that_score_a_prompt_come_before_those_that_draw():
    def part(start, num_tokens, **more):
        return share_of([1, 2, 3, 4, 5], start, num_tokens, blocks=[1, 2], num_prompt_logprobs=0, **more)

    plan = StepPlan(shares=(DECODE, part(0, 3), part(2, 3)))
    assert [list(share.scored) for share in plan.shares] == [[], [0, 1, 2], [2, 3]]
    assert batch_of(plan, 4).logit_rows.tolist() == [0, 1, 2, 3, 4, 5, 6]
    pre_empted = part(0, 5, num_prompt=4)  # after its first token: the prompt was told
    assert batch_of(StepPlan(shares=(pre_empted,)), 4).logit_rows.tolist() == [4]


def test_of_a_score_only_the_rows_of_its_continuations_are_wanted():
    def part(start, num_tokens):
        told = {"task": "score", "continuations": ((4, 5, 9), (8,))}
        return share_of([1, 2, 3, 4, 5], start, num_tokens, blocks=[1, 2], **told)

    plan = StepPlan(shares=(DECODE, part(0, 3), part(1, 4)))
    assert [list(share.scored) for share in plan.shares] == [[], [2], [2, 3, 4]]
    assert [share.ends_scoring for share in plan.shares] == [False, False, True]
    assert batch_of(plan, 4).logit_rows.tolist() == [0, 3, 5, 6, 7]


def test_a_step_in_which_nothing_is_drawn():
    batch = batch_of(StepPlan(shares=(CHUNK,)), 4)
    assert batch.logit_rows.tolist() == []
