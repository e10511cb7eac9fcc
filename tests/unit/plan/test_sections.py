"""A plan becomes sections of a recipe that mean the same, and a recipe's own words stay."""

from dataclasses import replace

import pytest

from penstock.models.decoder.config import DecoderConfig
from penstock.parallel.activation_checkpointing_plan import RecomputeConfig, plan
from penstock.parallel.layout import RankLayout
from penstock.plan.activations import block_bytes
from penstock.plan.job import TrainingStep
from penstock.plan.recipe_sections import decided, sections_of, with_plan

MODEL = DecoderConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def job(**changes):
    return TrainingStep(model=MODEL, sequence_length=32, **{"layout": RankLayout(shard=4), **changes})


def test_a_layout_is_written_whole_and_defaults_are_not():
    sections = sections_of(job(layout=RankLayout(shard=2, tensor=2, replicate=3), micro_batch_size=2))
    assert sections["parallel"] == {"shard": 2, "replicate": 3, "tensor": 2, "context": 1, "pipeline": 1}
    assert sections["recompute"] == {"policy": "none"}
    assert sections["data"] == {"micro_batch_size": 2}
    assert "ethernet" not in sections


def test_what_is_kept_gathered_and_staged_is_written():
    sections = sections_of(
        job(layout=RankLayout(pipeline=2, context=2), stages_per_rank=2, keep_mib=64.0, gather="int8")
    )
    assert sections["parallel"]["stages_per_rank"] == 2
    assert sections["parallel"]["context_rule"] == "all_gather"
    assert sections["ethernet"] == {"keep_mib": 64.0, "gather": "int8"}


def test_breadth_first_is_written_and_its_budget_is_of_all_micro_batches():
    mixed = job(modes=("full", "full", "keep", "keep"), num_micro_batches=3)
    sections = sections_of(replace(mixed, schedule="breadth_first"))
    assert sections["ethernet"] == {"schedule": "breadth_first"}
    assert int(sections["recompute"]["budget"]) == 3 * int(sections_of(mixed)["recompute"]["budget"])


def test_a_mixture_becomes_a_budget_that_plans_no_more_work():
    mixed = job(modes=("full", "full", "operators", "operators"))
    section = sections_of(mixed)["recompute"]
    kept = block_bytes(MODEL, MODEL.layers[0], tokens=32, compute_bytes=2)
    modes = plan(RecomputeConfig(**section), kept=[kept] * 4)
    assert sum(kept[mode] for mode in modes) <= sum(kept[mode] for mode in mixed.block_modes)
    assert modes.count("full") <= 2


def test_what_a_recipe_says_stays_and_the_rest_is_filled_in():
    raw = {"parallel": {"tensor": 2}, "recompute": {"policy": "full"}, "run": {"steps": 3}}
    planned = with_plan(raw, sections_of(job(layout=RankLayout(shard=2, tensor=2))))
    assert planned["parallel"] == {"shard": 2, "replicate": 1, "tensor": 2, "context": 1, "pipeline": 1}
    assert planned["recompute"] == {"policy": "full"}
    assert planned["run"] == {"steps": 3}
    assert planned["data"] == {"micro_batch_size": 1}


@pytest.mark.parametrize(
    ("raw", "knobs"),
    [
        ({}, {}),
        ({"parallel": {"shard": 8, "offload": True}}, {"shard": 8}),
        ({"recompute": {"policy": "operators"}}, {"modes": "operators"}),
        (
            {"data": {"micro_batch_size": 2}, "ethernet": {"keep_mib": 0.0}},
            {"micro_batch_size": 2, "keep_mib": 0.0},
        ),
    ],
)
def test_what_a_recipe_says_is_decided(raw, knobs):
    assert decided(raw) == knobs


def test_the_rest_of_the_ranks_is_said_in_numbers_but_as_many_copies_as_there_are_stay():
    sections = sections_of(job(layout=RankLayout(shard=4)))
    assert with_plan({"parallel": {"shard": -1}}, sections)["parallel"]["shard"] == 4
    assert with_plan({"parallel": {"replicate": -1, "shard": 4}}, sections)["parallel"]["replicate"] == -1
