"""Recomputed and compiled blocks give the losses and gradients of plain ones, to the bit, on sharded ranks.

The compiler's own programs round otherwise, so compiled blocks run their traced operators one by one
(`aot_eager`): tested is that tracing, sharding and recomputation mean the same, without a graph break.
"""

import pytest
import torch
from tests.rank_batches import import_compiler

from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.nn.init import init_weights
from penstock.parallel.activation_checkpointing import recompute
from penstock.parallel.activation_checkpointing_plan import RecomputeConfig, plan
from penstock.parallel.apply import compile_blocks
from penstock.parallel.config import CompileConfig
from penstock.parallel.layout import RankLayout
from penstock.parallel.mesh import make_mesh
from penstock.parallel.sharding.fsdp import shard
from penstock.parallel.tensor import slice_blocks
from penstock.parallel.vocab_parallel import finish_with_slices, slice_vocabulary
from penstock.testing.ranks import on_ranks
from penstock.train.loss import next_token_loss

SHAPE = DecoderConfig(
    model_type="qwen3",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler warns of what it does itself
ENDS = ([0, 5, 16, 32], [0, 16, 20, 21, 32])
WAYS = {
    "plain": {},
    "operators": {"policy": "operators"},
    "full": {"policy": "full"},
    "every": {"policy": "every"},
    "compiled": {"compiled": True},
    "compiled operators": {"policy": "operators", "compiled": True},
    "compiled full": {"policy": "full", "compiled": True},
}


@pytest.fixture(scope="module", autouse=True)
def compiler():
    import_compiler()


def built(world, *, policy="none", compiled=False, tensor=1, dtype=torch.float32):
    with torch.device("meta"):
        model = Decoder(SHAPE)
    mesh = make_mesh(world, RankLayout(shard=world.ranks.world_size // tensor, tensor=tensor))
    if tensor > 1:
        slice_blocks(model, mesh.state["tensor"])
        slice_vocabulary(model, mesh.state["tensor"])
        finish_with_slices(model, mesh.state["tensor"])
    recompute(model, plan(RecomputeConfig(policy=policy), kept=[{}] * SHAPE.num_hidden_layers))
    compile_blocks(model, CompileConfig(enabled=compiled), backend="aot_eager")
    shard(model, mesh.data, compute_dtype=dtype)
    model.to_empty(device="cpu")
    init_weights(model, seed=3)
    return model


def trained(world, **settings):
    """Return the losses of two batches of other documents, and the gradients they add up to."""
    torch.compiler.reset()
    model, losses = built(world, **settings), []
    ids = torch.arange(32).view(2, 16) * 7 % 32
    for ends in ENDS:
        loss = model(
            ids, cu_seqlens=torch.tensor(ends, dtype=torch.int32), finish=next_token_loss(ids.roll(-1))
        )
        loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad.to_local().clone() for name, p in model.named_parameters()}


def assert_same(found, expected):
    assert found[0] == expected[0]
    for name, gradient in expected[1].items():
        assert found[1][name].equal(gradient), name


@pytest.mark.parametrize(
    ("dtype", "ways"),
    [(torch.float32, tuple(WAYS)), (torch.bfloat16, ("plain", "every", "compiled operators"))],
    ids=["float32", "bfloat16"],
)
def test_every_way_gives_the_same_bits_on_sharded_ranks(dtype, ways):
    def work(world):
        return {name: trained(world, dtype=dtype, **WAYS[name]) for name in ways}

    for of_rank in on_ranks(work, ranks=2):
        for found in of_rank.values():
            assert_same(found, of_rank["plain"])


def test_each_recomputation_gives_the_same_bits_on_ranks_that_share_matrices():
    """The ways that meet the collectives of a block; test_parallel_layouts.py compiles such blocks whole."""
    ways = ("plain", "operators", "full", "compiled operators", "compiled full")

    def work(world):
        return {name: trained(world, tensor=2, **WAYS[name]) for name in ways}

    for of_rank in on_ranks(work, ranks=2):
        for found in of_rank.values():
            assert_same(found, of_rank["plain"])
