"""The bytes that blocks keep, as planned, against the tensors that are alive after a forward pass."""

import pytest
import torch

from penstock.core import config as configs
from penstock.core.errors import ConfigError
from penstock.models.llama.config import LlamaConfig
from penstock.models.llama.model import Llama
from penstock.nn.init import init_weights
from penstock.parallel.layout import Layout
from penstock.parallel.recompute import recompute
from penstock.testing.corpora import write_corpus
from penstock.testing.live_bytes import LiveBytes
from penstock.train.activations import block_bytes
from penstock.train.config import build_recipe
from penstock.train.memory_plan import memory_plan, micro_batch_tokens, recompute_modes

ROWS, LENGTH = 2, 64
ENDS = torch.tensor([0, 20, 64, 128], dtype=torch.int32)
SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def alive_after_forward(model_type, mode, dtype, *, blocks):
    model = Llama(LlamaConfig(**SIZES, model_type=model_type, num_hidden_layers=blocks)).to(dtype)
    init_weights(model, seed=0)
    recompute(model, [mode] * blocks)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    with LiveBytes() as seen:
        hidden = model.hidden(ids, cu_seqlens=ENDS)
        kept = seen.now
    del hidden
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["keep", "operators", "full"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_block_keeps_what_the_plan_says(model_type, mode, dtype):
    """Within 1%: what three blocks keep beyond one, so that what a model keeps once is not in it."""
    found = [alive_after_forward(model_type, mode, dtype, blocks=blocks) for blocks in (1, 3)]
    shape = LlamaConfig(**SIZES, model_type=model_type, num_hidden_layers=3)
    planned = block_bytes(shape, tokens=ROWS * LENGTH, compute_bytes=dtype.itemsize)[mode]
    assert (found[1] - found[0]) / 2 == pytest.approx(planned, rel=0.01)


@pytest.fixture
def raw(tmp_path):
    corpus = write_corpus(tmp_path / "c", [[1] * 6] * 200, vocab_size=32)
    return {
        "run": {"dir": str(tmp_path / "run"), "steps": 5},
        "model": {**SIZES, "num_hidden_layers": 4},
        "data": {
            "corpora": {"c": {"path": str(corpus)}},
            "sequence_length": 16,
            "global_batch_size": 8,
            "micro_batch_size": 2,
        },
        "compute": "float32",
    }


def recipe_of(raw, *settings):
    return build_recipe(configs.override(raw, list(settings)))


def test_a_plan_adds_up_and_shards_what_is_sharded(raw):
    alone, four = (memory_plan(recipe_of(raw), Layout(shard=ranks)) for ranks in (1, 4))
    parameters = recipe_of(raw).model.num_parameters
    assert (alone.weights, alone.gradients, alone.optimizer) == (
        4 * parameters,
        4 * parameters,
        8 * parameters,
    )
    assert four.weights == alone.weights // 4
    assert four.activations == alone.activations  # the micro-batch is the same
    assert alone.recomputed == 0
    again = memory_plan(recipe_of(raw, "recompute.policy=full"), Layout())
    assert again.recomputed == block_bytes(recipe_of(raw).model, tokens=32, compute_bytes=4)["keep"]
    saved = alone.activations - again.activations
    assert again.total == alone.total - saved + max(0, again.recomputed - again.loss)
    lines = alone.lines()
    assert len(lines) == 8
    assert lines["memory, all"].endswith("MiB")


def test_in_a_pipeline_the_rank_that_needs_most_is_planned(raw):
    raw["data"] |= {"global_batch_size": 64, "micro_batch_size": 2}
    alone = memory_plan(recipe_of(raw), Layout())
    staged = recipe_of(raw, "parallel.pipeline=2")
    plan, model = memory_plan(staged, Layout(pipeline=2)), staged.model
    matrix = model.vocab_size * model.hidden_size
    half = matrix + (model.num_parameters - 2 * matrix) // 2  # its blocks, and the embedding or the other end
    assert (plan.weights, plan.gradients, plan.optimizer) == (4 * half, 4 * half, 8 * half)
    assert plan.gathered == 8 * half, "whole parameters, and float32 sums of their gradients"
    assert plan.activations == alone.activations, "half the blocks for two micro-batches: the first stage"
    assert plan.loss == 0, "which is not there"
    twice = memory_plan(
        recipe_of(raw, "parallel.pipeline=2", "parallel.stages_per_rank=2"), Layout(pipeline=2)
    )
    assert twice.activations == alone.activations * 5 // 4


def test_in_a_pipeline_a_tied_matrix_is_planned_at_both_ends(raw):
    staged = recipe_of(raw, "parallel.pipeline=2")
    tied = recipe_of(raw, "parallel.pipeline=2", "model.tie_word_embeddings=true")
    layout = Layout(pipeline=2)
    assert memory_plan(tied, layout).weights == memory_plan(staged, layout).weights
    assert memory_plan(tied, Layout()).weights < memory_plan(staged, Layout()).weights


def test_copies_hold_whole_weights(raw):
    copies = memory_plan(recipe_of(raw, "parallel.shard=1", "parallel.replicate=4"), Layout(replicate=4))
    assert copies.weights == memory_plan(recipe_of(raw), Layout()).weights


def test_the_largest_micro_batch_of_the_schedule_counts(raw):
    raw["data"]["schedule"] = [{"at_step": 2, "sequence_length": 32}, {"at_step": 3, "micro_batch_size": 1}]
    raw["data"]["micro_batch_size"] = 2
    assert micro_batch_tokens(recipe_of(raw), Layout()) == 64


def test_a_budget_decides_how_many_blocks_are_computed_again(raw):
    kept = block_bytes(recipe_of(raw).model, tokens=32, compute_bytes=4)
    budget = 3 * kept["keep"] + kept["full"]
    recipe = recipe_of(raw, "recompute.policy=budget", f'recompute.budget="{budget}"')
    assert recompute_modes(recipe, Layout()) == ["operators", "operators", "operators", "keep"]
    assert memory_plan(recipe, Layout()).activations <= budget
    with pytest.raises(ConfigError, match="below the"):
        recompute_modes(recipe_of(raw, "recompute.policy=budget", 'recompute.budget="10"'), Layout())
