"""Layers in cache groups: no block more than layers see, by much; counted in the scheduler's own pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.hashing_model import sequences_of

from penstock.engine.request import Request
from penstock.engine.scheduling.blocks import BlockPool
from penstock.engine.scheduling.groups import blocks_of, cache_groups, first_block, max_blocks, rows_of
from penstock.engine.scheduling.scheduler import Scheduler, StepLimits

CONTEXT = 2**15
BLOCK_SIZE = 16
PATTERNS = {
    "gemma 3 1b": [*[512] * 5, None] * 4 + [512] * 2,
    "gemma 3 4b": [*[1024] * 5, None] * 5 + [1024] * 4,
    "gemma 3 12b": [*[1024] * 5, None] * 8,
    "gemma 3 27b": [*[1024] * 5, None] * 10 + [1024] * 2,
    "olmo 3 7b": [*[4096] * 3, None] * 8,
    "olmo 3 32b, exaone 4 32b, cwm": [*[4096] * 3, None] * 16,
    "one layer that sees all": [*[2048] * 10, None],
    "three windows": [512, 512, 2048, None] * 6,
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("chunk", [512, 2048])
def test_a_running_sequence_holds_little_more_than_its_layers_see(name, chunk):
    windows = PATTERNS[name]
    groups = cache_groups(windows, context=CONTEXT)
    pool = BlockPool(rows_of(groups) * len(groups) * CONTEXT)  # enough for anything
    limits = StepLimits(
        max_sequences=1,
        tokens_per_step=chunk,
        block_size=BLOCK_SIZE,
        windows=tuple(group.window for group in groups),
    )
    scheduler = Scheduler(limits, pool)
    (sequence,) = sequences_of(Request(prompt=(1,) * (CONTEXT - 100), max_tokens=100), first_id=0)
    scheduler.add(sequence)
    most = 0
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        share = plan.shares[0]
        end, since = share.start + share.num_tokens, share.start + 1
        seen = sum(len(sequence.tokens) if w is None else end - max(0, since - w) for w in windows)
        held = pool.num_used * BLOCK_SIZE * rows_of(groups)
        assert held <= 1.25 * seen, (held / seen, share.start)
        most = max(most, pool.num_used)
        scheduler.commit(plan, [[2]] if share.samples else [])
    assert most <= blocks_of(CONTEXT, limits.windows, block_size=BLOCK_SIZE, share_tokens=chunk)
    assert pool.num_used == 0


@pytest.mark.parametrize(
    ("name", "rows", "count"),
    [("gemma 3 12b", 8, 6), ("gemma 3 27b", 11, 6), ("olmo 3 7b", 8, 4), ("one layer that sees all", 1, 11)],
)
def test_patterns_of_known_models_need_few_groups(name, rows, count):
    groups = cache_groups(PATTERNS[name], context=CONTEXT)
    assert (rows_of(groups), len(groups)) == (rows, count)


@given(st.lists(st.sampled_from([None, 3, 7, 64]), min_size=1, max_size=70), st.integers(1, 80))
@examples(200)
def test_every_layer_is_in_one_group_of_its_window_and_few_rows_are_unused(windows, context):
    groups = cache_groups(windows, context=context)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    for group in groups:
        assert all((windows[layer] or context) >= (group.window or context) for layer in group.layers)
        assert group.window is None or {windows[layer] for layer in group.layers} == {group.window}
    for window in {group.window for group in groups}:
        count = sum(len(group.layers) for group in groups if group.window == window)
        rows = rows_of(groups) * sum(group.window == window for group in groups)
        assert count <= rows <= count + count // 8


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(0, 200))
@examples(200)
def test_a_share_lies_within_the_blocks_that_are_counted_for_it(window, share, block_size, start):
    held = -(-(start + share) // block_size) - first_block(start, window, block_size)
    assert held <= max_blocks(window, block_size=block_size, share_tokens=share)
    seen = range(max(0, start + 1 - window), start + share)
    assert first_block(start, window, block_size) == (seen[0] if seen else start) // block_size
