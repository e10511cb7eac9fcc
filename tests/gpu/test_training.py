"""Losses and gradients of training: those of a plain loop in float64, however a step is computed."""

import pytest
import torch
from tests.families import small_llama
from torch.nn import functional

from penstock.models.decoder.model import Decoder
from penstock.nn.init import init_weights
from penstock.parallel.activation_checkpointing import recompute
from penstock.parallel.activation_checkpointing_plan import RecomputeConfig, plan
from penstock.parallel.apply import compile_blocks
from penstock.parallel.config import CompileConfig
from penstock.parallel.layout import RankLayout
from penstock.parallel.mesh import join, make_mesh
from penstock.parallel.sharding.fsdp import shard
from penstock.testing.training import records_of
from penstock.train.data_setup import train_loader
from penstock.train.loss import next_token_loss
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler warns of what it does itself
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of a gradient's norm: sums in another order, of numbers with 24 and 8 bits."""
NEAR_EXACT = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
"""The same, from float64."""
WAYS = {
    "operators recomputed": {"policy": "operators"},
    "blocks recomputed": {"policy": "full"},
    "every second block recomputed": {"policy": "every"},
    "compiled": {"compiled": True},
    "compiled, operators recomputed": {"policy": "operators", "compiled": True},
    "compiled, blocks recomputed": {"policy": "full", "compiled": True},
}


def shape_of(is_tiny):
    heads, dim = (5, 16) if is_tiny else (9, 64)
    return small_llama(
        model_type="qwen3",
        vocab_size=97 if is_tiny else 2003,
        hidden_size=heads * dim,
        intermediate_size=3 * heads * dim,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=1 if is_tiny else 3,
        head_dim=dim,
        max_position_embeddings=2048,
    )


def batches(vocab, device, is_tiny):
    """Yield ids, labels and documents' ends of two batches, of other documents."""
    rows, length = (2, 24) if is_tiny else (2, 509)
    generator = torch.Generator().manual_seed(2)
    for share in (3, 7):
        ids = torch.randint(0, vocab, (rows, length), generator=generator).to(device)
        ends = torch.tensor([0, length // share, length, rows * length - 5, rows * length], dtype=torch.int32)
        yield ids, ids.roll(-1, 1), ends.to(device)


def gradients_of(model, device, is_tiny):
    """Return the losses of two batches, and the gradients they add up to."""
    losses = []
    for ids, labels, ends in batches(shape_of(is_tiny).vocab_size, device, is_tiny):
        loss = model(ids, cu_seqlens=ends, finish=next_token_loss(labels))
        loss.backward()
        losses.append(loss.item())
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        found[name] = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).double()
    return losses, found


def built(device, is_tiny, *, dtype, policy="none", compiled=False):
    torch.compiler.reset()
    model = Decoder(shape_of(is_tiny)).to(device)
    init_weights(model, seed=3)
    model.to(dtype)
    recompute(model, plan(RecomputeConfig(policy=policy), kept=[{}] * 3))
    backend = "inductor" if device.type == "cuda" else "aot_eager"  # whose programs take a minute on a CPU
    compile_blocks(model, CompileConfig(enabled=compiled), backend=backend)
    return model


def assert_near(found, expected, near):
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours == pytest.approx(theirs, rel=near)
    for name, gradient in expected[1].items():
        error = (found[1][name] - gradient).norm() / gradient.norm()
        assert error < near, f"{name}: {error:.2g} of its norm"


@pytest.fixture(scope="module")
def plain(device, is_tiny):
    """Losses and gradients of each type of numbers, computed once."""
    return {
        dtype: gradients_of(built(device, is_tiny, dtype=dtype), device, is_tiny)
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    }


@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_losses_and_gradients_are_those_of_float64(dtype, plain):
    assert_near(plain[dtype], plain[torch.float64], NEAR_EXACT[dtype])


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_recomputed_and_compiled_blocks_give_the_same(way, dtype, plain, device, is_tiny):
    is_the_one = dtype == torch.float32 and way == "compiled, blocks recomputed"
    if "compiled" in WAYS[way] and not is_the_one and (is_tiny or dtype == torch.float32):
        pytest.skip("compiling takes long: once in float32, and in all ways in bfloat16 on GPUs")
    found = gradients_of(built(device, is_tiny, dtype=dtype, **WAYS[way]), device, is_tiny)
    if "compiled" in WAYS[way]:  # fused operators round less often, so that they differ from plain ones
        assert_near(found, plain[torch.float64], NEAR_EXACT[dtype])
    else:
        assert_near(found, plain[dtype], NEAR[dtype])


@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_fsdp_of_one_rank_gives_what_the_plain_model_does(dtype, plain, device, is_tiny):
    """By NCCL on GPUs, by gloo on CPUs; parameters and sums of gradients are float32."""
    with join() as world:
        assert world.device.type == device.type
        model = Decoder(shape_of(is_tiny)).to(device)
        mesh = make_mesh(world, RankLayout(shard=1))
        shard(model, mesh.data, compute_dtype=dtype)
        init_weights(model, seed=3)
        found = gradients_of(model, device, is_tiny)
    assert_near(found, plain[dtype], NEAR[dtype])


@pytest.mark.parametrize("way", ["plain", "compiled", "offloaded"])
def test_a_run_has_the_losses_of_a_plain_loop_in_float64(way, device, is_tiny, tmp_path):
    """With the real loader and its pinned staging, clipping and AdamW."""
    recipe = recipe_of(tmp_path / "run", is_tiny, way)
    expected = plain_losses(recipe, device)
    with join() as world:
        if device.type == "cpu" and way == "compiled":
            pytest.skip("Inductor takes a minute on a CPU; blocks are compiled in the tests before")
        records = records_of(open_state(recipe, world), recipe, world)
    found = [record["loss"] for record in records if "loss" in record]
    assert found == pytest.approx(expected, rel=2e-4)


def recipe_of(folder, is_tiny, way):
    return build_recipe(
        {
            "run": {"dir": str(folder), "steps": 4 if is_tiny else 12},
            "model": {
                "hidden_size": 64 if is_tiny else 256,
                "intermediate_size": 96 if is_tiny else 720,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 211,
            },
            "data": {
                "corpora": {"c": {"path": "synthetic:tokens=1M,mean_document=60,vocab_size=211"}},
                "sequence_length": 40 if is_tiny else 250,
                "global_batch_size": 6,
                "micro_batch_size": 2,
            },
            "optim": {"learning_rate": 3e-3, "clip_norm": 0.5},
            "schedule": {"rule": "constant"},
            "compute": "float32",
            "compile": {"enabled": way == "compiled"},
            "parallel": {"offload": way == "offloaded"},
        }
    )


def plain_losses(recipe, device):
    """Return the losses of a loop that knows nothing of Penstock's trainer, in float64."""
    model = Decoder(recipe.model).to(device)
    init_weights(model, seed=recipe.run.seed)
    model.double()
    optim = recipe.optim
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=optim.learning_rate,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
    )
    losses = []
    stream = iter(train_loader(recipe, rank=0, world_size=1, deliver="torch"))
    for _ in range(recipe.run.steps):
        batch = {name: tensor.to(device) for name, tensor in next(stream).items() if hasattr(tensor, "to")}
        logits = model(batch["input_ids"], position_ids=batch["position_ids"], cu_seqlens=batch["cu_seqlens"])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten().long())
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
        adamw.step()
        losses.append(loss.item())
    stream.close()
    return losses
