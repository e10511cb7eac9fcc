"""A recipe's memory: which parts, of which rank, at which of its micro-batches."""

import pytest

from penstock.core import config as configs
from penstock.core.errors import ConfigError
from penstock.parallel.layout import RankLayout
from penstock.plan.activations import block_bytes
from penstock.testing.corpora import write_corpus
from penstock.train.planning.memory import memory_plan, micro_batch_tokens, recompute_modes
from penstock.train.resolve.load import build_recipe

BREADTH = "ethernet.schedule=breadth_first"
SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


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
    alone, four = (memory_plan(recipe_of(raw), RankLayout(shard=ranks)) for ranks in (1, 4))
    parameters = recipe_of(raw).model.num_parameters
    assert (alone.weights, alone.gradients, alone.optimizer) == (
        4 * parameters,
        4 * parameters,
        8 * parameters,
    )
    assert alone.total == sum(alone.parts.values())
    assert four.weights == alone.weights // 4
    assert four.total < alone.total
    lines = alone.lines()
    assert len(lines) == len(alone.parts) + 1
    assert lines[f"memory, all, in the {alone.moment}"].endswith("MiB")


def test_gradients_of_micro_batches_before_are_there_in_the_first_forward_of_none(raw):
    raw["data"] |= {"global_batch_size": 2, "micro_batch_size": 2}
    one = memory_plan(recipe_of(raw), RankLayout())
    raw["data"] |= {"global_batch_size": 4}
    two = memory_plan(recipe_of(raw), RankLayout())
    assert one.gradients < two.gradients
    assert one.total < two.total


def test_a_block_that_is_computed_again_is_there_once(raw):
    keep, full = (
        memory_plan(recipe_of(raw, f"recompute.policy={policy}"), RankLayout()) for policy in ("none", "full")
    )
    kept = block_bytes(model := recipe_of(raw).model, model.layers[0], tokens=32, compute_bytes=4)
    assert full.activations < keep.activations - 2 * kept["keep"]
    assert full.working >= kept["keep"]
    assert full.total < keep.total


def test_in_a_pipeline_the_rank_that_needs_most_is_planned(raw):
    raw["data"] |= {"global_batch_size": 64, "micro_batch_size": 2}
    staged = recipe_of(raw, "parallel.pipeline=2")
    plan, model = memory_plan(staged, RankLayout(pipeline=2)), staged.model
    matrix = model.vocab_size * model.hidden_size
    half = matrix + (model.num_parameters - 2 * matrix) // 2  # its blocks, and the embedding or the other end
    assert plan.weights == pytest.approx(4 * half, rel=0.01)
    assert plan.gathered == pytest.approx(4 * half, rel=0.01), "float32 sums of whole gradients"
    assert plan.loss == 0, "the first stage, which holds two micro-batches"
    twice = memory_plan(
        recipe_of(raw, "parallel.pipeline=2", "parallel.stages_per_rank=2"), RankLayout(pipeline=2)
    )
    assert twice.activations == pytest.approx(plan.activations * 5 / 4, rel=0.05)


def test_in_a_pipeline_a_tied_matrix_is_planned_at_both_ends(raw):
    staged = recipe_of(raw, "parallel.pipeline=2")
    tied = recipe_of(raw, "parallel.pipeline=2", "model.tie_word_embeddings=true")
    layout = RankLayout(pipeline=2)
    assert memory_plan(tied, layout).weights == memory_plan(staged, layout).weights
    assert memory_plan(tied, RankLayout()).weights < memory_plan(staged, RankLayout()).weights


def test_copies_hold_whole_weights(raw):
    copies = memory_plan(recipe_of(raw, "parallel.shard=1", "parallel.replicate=4"), RankLayout(replicate=4))
    assert copies.weights == memory_plan(recipe_of(raw), RankLayout()).weights


def test_the_largest_micro_batch_of_the_schedule_counts(raw):
    raw["data"]["schedule"] = [{"at_step": 2, "sequence_length": 32}, {"at_step": 3, "micro_batch_size": 1}]
    raw["data"]["micro_batch_size"] = 2
    assert micro_batch_tokens(recipe_of(raw), RankLayout()) == 64


def test_breadth_first_the_activations_of_all_micro_batches_are_there(raw):
    raw["data"] |= {"global_batch_size": 8, "micro_batch_size": 2}
    depth, breadth = (memory_plan(recipe_of(raw, *more), RankLayout()) for more in ((), (BREADTH,)))
    assert breadth.activations == pytest.approx(4 * depth.activations, rel=0.05)
    assert breadth.weights == depth.weights
    kept = block_bytes(model := recipe_of(raw).model, model.layers[0], tokens=32, compute_bytes=4)
    budget = ("recompute.policy=budget", f'recompute.budget="{4 * kept["keep"]}"')
    assert recompute_modes(recipe_of(raw, *budget), RankLayout()) == ["keep"] * 4
    assert recompute_modes(recipe_of(raw, *budget, BREADTH), RankLayout()) != ["keep"] * 4


def test_breadth_first_the_step_with_most_tokens_counts(raw):
    raw["data"] |= {"global_batch_size": 2, "micro_batch_size": 2}
    raw["data"]["schedule"] = [{"at_step": 2, "global_batch_size": 8, "micro_batch_size": 1}]
    grown = memory_plan(recipe_of(raw, BREADTH), RankLayout())
    assert grown.activations > 3 * memory_plan(recipe_of(raw), RankLayout()).activations


def test_a_budget_decides_how_many_blocks_are_computed_again(raw):
    kept = block_bytes(model := recipe_of(raw).model, model.layers[0], tokens=32, compute_bytes=4)
    budget = 3 * kept["keep"] + kept["full"]
    recipe = recipe_of(raw, "recompute.policy=budget", f'recompute.budget="{budget}"')
    assert recompute_modes(recipe, RankLayout()) == ["operators", "operators", "operators", "keep"]
    assert memory_plan(recipe, RankLayout()).activations <= budget
    with pytest.raises(ConfigError, match="below the"):
        recompute_modes(recipe_of(raw, "recompute.policy=budget", 'recompute.budget="10"'), RankLayout())
