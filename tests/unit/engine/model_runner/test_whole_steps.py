"""Steps of the whole network in one call against the same network block by block."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.engine.model_runner.batch import StepBatch
from penstock.engine.model_runner.kv_cache import PagedCache
from penstock.engine.model_runner.lora import Adapters
from penstock.engine.model_runner.native_decoder import open_native_decoder
from penstock.engine.model_runner.runner import Runner
from penstock.engine.model_runner.serving_layers import fuse, prepare
from penstock.models.decoder.model import Decoder
from penstock.nn.linear.packed import can_multiply
from penstock.nn.rope import RopeCache
from tests.families import small_families

CONFIGS = small_families(
    vocab_size=100,
    hidden_size=96,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
)
BLOCK_SIZE = 4
BLOCKS = np.array([[5, 0, 3], [7, 9, 2], [1, 4, 10]], np.int32)
STEPS = [[(0, 7), (0, 1), (0, 9)], [(7, 8), (1, 2), (9, 12)], [(8, 9), (2, 7)]]
"""First and past position of each sequence's share in each step."""

pytestmark = pytest.mark.skipif(
    not can_multiply(torch.zeros(1)), reason="this CPU has no such instructions, or no compiler"
)


def a_runner(
    name="llama", *, dtype=torch.float32, weights="stored", pages=None, num_blocks=11, groups=None, **changes
):
    """Return a runner of a small model; `groups` as in `PagedCache`."""
    torch.manual_seed(0)
    model = Decoder(replace(CONFIGS[name], **changes)).to(dtype).eval()
    for parameter in model.parameters():  # norms and biases that change something
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    fuse(model)
    prepare(model, weights)
    cache = PagedCache(
        model.config.num_hidden_layers if groups is None else max(map(len, groups)),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        kv_heads=model.config.key_value_heads,
        head_dim=model.config.size_of_head,
        dtype=pages or dtype,
        device=torch.device("cpu"),
        groups=groups,
    )
    return Runner(model, cache, Adapters(model, model.config))


def a_batch(spans, *, asked=None, vectors=(), blocks=BLOCKS):
    """Return a step of these shares; `asked` are the rows whose logits are needed, else all."""
    sizes = np.array([past - first for first, past in spans])
    ends = sizes.cumsum()
    positions = np.concatenate([np.arange(first, past) for first, past in spans])
    owner = np.repeat(np.arange(len(spans)), sizes)
    slots = blocks[owner, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    return StepBatch(
        token_ids=(7 * positions + 31 * owner) % 100,
        positions=positions,
        slots=slots[None],
        query_starts=np.array([0, *ends], np.int32),
        lengths=np.array([past for _, past in spans], np.int32),
        block_tables=blocks[None, : len(spans)],
        logit_rows=np.arange(ends[-1]) if asked is None else np.array(asked, np.int64),
        adapters=np.full(len(spans), -1, np.int32),
        vector_rows=np.array(vectors, np.int64),
    )


def in_groups(batch, num_groups, *, num_blocks=11):
    """The same step where each cache group has blocks of its own, in an order of its own."""
    order = np.random.default_rng(0).permutation(num_groups * num_blocks).reshape(num_groups, num_blocks)
    of_slots, offsets = divmod(batch.slots[0], BLOCK_SIZE)
    return replace(
        batch,
        slots=np.ascontiguousarray(order[:, of_slots] * BLOCK_SIZE + offsets),
        block_tables=order[:, batch.block_tables[0]].astype(np.int32),
    )


def by_modules(runner):
    """The same weights and pages of its own, computed block by block."""
    cache = runner.cache
    pages = PagedCache(
        cache.pages.shape[0],
        num_blocks=cache.pages.shape[2],
        block_size=BLOCK_SIZE,
        kv_heads=cache.pages.shape[3],
        head_dim=runner.model.config.size_of_head,
        dtype=cache.pages.dtype,
        device=torch.device("cpu"),
        groups=[
            [
                cache.places.index((group, row))
                for row in range(len(cache.pages))
                if (group, row) in cache.places
            ]
            for group in range(cache.num_groups)
        ],
    )
    model = runner.model
    return Runner(
        model,
        pages,
        Adapters(model, model.config),
        forward=lambda ids, positions, bound: model.hidden(ids, position_ids=positions, cache=bound),
    )


@pytest.mark.parametrize("weights", ["stored", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_whole_step_computes_what_blocks_do_one_by_one(name, dtype, weights):
    runner = a_runner(name, dtype=dtype, weights=weights)
    blocks = by_modules(runner)
    for spans in STEPS:
        batch = a_batch(spans)
        ours, theirs = runner.run(batch), blocks.run(batch)
        assert runner._native is not None
        assert torch.equal(ours.hidden, theirs.hidden)
        assert torch.equal(ours.logits, theirs.logits)
    assert torch.equal(runner.cache.pages, blocks.cache.pages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_whole_step_over_pages_of_8_bits_computes_what_blocks_do(name, dtype):
    runner = a_runner(name, dtype=dtype, pages=torch.int8)
    blocks = by_modules(runner)
    for spans in STEPS:
        batch = a_batch(spans)
        ours, theirs = runner.run(batch), blocks.run(batch)
        assert ours.logits.dtype == dtype
        assert torch.equal(ours.logits, theirs.logits)
    assert runner._native is not None
    assert torch.equal(runner.cache.pages, blocks.cache.pages)


@pytest.mark.parametrize("pages", [None, torch.int8])
@pytest.mark.parametrize("groups", [[[0, 2], [3, 1]], [[3], [0], [1], [2]], [[0, 1, 3], [2]]])
def test_layers_in_groups_compute_what_layers_of_one_group_do(groups, pages):
    sizes = {"num_hidden_layers": 4, "max_window_layers": 2, "pages": pages}
    whole = a_runner("qwen2", **sizes)
    grouped = a_runner("qwen2", **sizes, groups=groups, num_blocks=11 * len(groups))
    blocks = by_modules(grouped)
    for spans in STEPS:
        batch = a_batch(spans, asked=(0, 1))
        expected = whole.run(batch).logits
        for runner in (grouped, blocks):
            assert torch.equal(runner.run(in_groups(batch, len(groups))).logits, expected)
    assert grouped._native is not None
    assert torch.equal(grouped.cache.pages, blocks.cache.pages)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("asked", "vectors"),
    [((6, 7, 16), ()), ((), ()), ((2, 4), (16,)), ((), (6, 7)), ((7,), (0,))],
    ids=["the last of each", "none", "some of one", "vectors alone", "a vector of a whole share"],
)
def test_what_is_asked_for_is_as_if_all_had_been_asked_for(asked, vectors, dtype, name):
    runner = a_runner(name, dtype=dtype)
    blocks = by_modules(runner)
    batch = a_batch(STEPS[0], asked=asked, vectors=vectors)
    ours, theirs = runner.run(batch), blocks.run(a_batch(STEPS[0]))
    assert torch.equal(ours.logits, theirs.logits[list(asked)])
    rows = [*asked, *vectors]
    assert torch.equal(ours.hidden[rows], theirs.hidden[rows])
    assert torch.equal(runner.cache.pages, blocks.cache.pages)  # of all tokens


def test_a_layer_that_something_wraps_is_called_by_its_module():
    runner = a_runner()
    assert open_native_decoder(runner.model, runner.cache) is not None
    mlp = runner.model.layers[1].mlp
    mlp.down = torch.nn.Sequential(mlp.down)
    assert open_native_decoder(runner.model, runner.cache) is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("token_ids", 100, "no token 100 of 100"),
        ("slots", 44, "no slot 44 of 44"),
        ("positions", -1, "no position -1"),
        ("logit_rows", 17, "no row 17 of 17"),
        ("block_tables", 11, "no block 11"),
    ],
)
def test_indexes_of_nothing_are_refused(name, value, message):
    batch = a_batch(STEPS[0])
    array = getattr(batch, name).copy()
    array.flat[0] = value
    with pytest.raises(RuntimeError, match=message):
        a_runner().run(replace(batch, **{name: array}))


def test_tables_of_angles_grow_to_the_position_asked_for():
    lengths = []

    def make(positions):
        lengths.append(positions.shape[1])
        return positions[..., None, None], -positions[..., None, None]

    cache = RopeCache(make, max_positions=5000)
    for position in (3, 1023, 1024, 4000, 4999):
        cosines, sines = cache.up_to(position)
        assert cosines[0, position, 0, 0] == position == -sines[0, position, 0, 0]
    assert lengths == [1, 1024, 2048, 4096, 5000]
