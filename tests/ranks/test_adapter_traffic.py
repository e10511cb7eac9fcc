"""What a step with an adapter sends, by the traffic meter on real ranks; and islands that tune one."""

from dataclasses import replace

import pytest
from tests.peft_loop import folder_of
from tests.rank_batches import RankBatches
from tests.ranks.test_new_rows_training import corpus_of
from transformers import LlamaConfig

from penstock.devices.figures import DEVICES
from penstock.parallel.flight_recorder import TrafficMeter
from penstock.parallel.layout import layout_of
from penstock.plan.hardware import Cluster
from penstock.plan.predict import predict
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.monitors.step_monitors import StepMonitors
from penstock.train.planning.memory import job_of
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

SMALL = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LORA = {"method": "lora", "rank": 4, "alpha": 8.0}
TWO_HOSTS = Cluster(
    name="two hosts", nodes=2, devices_per_node=1, device=DEVICES["CPU"], nics=1, nic_gbit_s=1.0
)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    where = tmp_path_factory.mktemp("adapters")
    documents = [[1 + (i * j) % 60 for j in range(1 + i % 50)] for i in range(300)]
    write_corpus(where / "corpus", documents, vocab_size=64)
    return where / "corpus", folder_of(where / "base", LlamaConfig(**SMALL))


def recipe_of(places, run, tune, *, steps=3, **sections):
    corpus, base = places
    return build_recipe(
        {
            "run": {"dir": str(run), "steps": steps, "start_from": str(base)},
            "tune": tune,
            "data": {
                "corpora": {"c": {"path": str(corpus)}},
                "sequence_length": 24,
                "global_batch_size": 8,
                "micro_batch_size": 2,
            },
            "schedule": {"rule": "constant"},
            "compute": "float32",
            **sections,
        }
    )


def sent(recipe, world):
    """Return the bytes that a rank sends in a step, and those of its own gradients."""
    state = open_state(recipe, world)
    pipeline = state.pipeline
    by_stages = (lambda: 0) if pipeline is None else lambda: pipeline.sent_bytes
    state.watch = StepMonitors(traffic=TrafficMeter(state.mesh, sent_by_stages=by_stages))
    records = records_of(state, recipe, world)
    gradients = sum(p.numel() * 4 for p in state.model.parameters() if p.requires_grad)
    (found,) = (record["sent_bytes"] for record in records if "sent_bytes" in record)
    return sum(found.values()), gradients, [r["loss"] for r in records if "loss" in r]


def test_a_step_sends_the_adapters_gradients_and_nothing_else(places, tmp_path):
    recipe = recipe_of(places, tmp_path / "run", {**LORA, "base_sharding": "whole"})
    for bytes_sent, gradients, _ in on_ranks(lambda world: sent(recipe, world), ranks=2):
        assert gradients <= bytes_sent <= 1.1 * gradients


def test_with_a_sharded_base_a_step_sends_less_than_full_tuning(places, tmp_path):
    tunes = {"full": {"method": "full"}, "lora": {**LORA, "base_sharding": "sharded"}}
    recipes = [recipe_of(places, tmp_path / name, tune, steps=2) for name, tune in tunes.items()]
    found = on_ranks(lambda world: [sent(recipe, world)[0] for recipe in recipes], ranks=2)
    full, lora = map(max, zip(*found, strict=True))
    assert lora < 0.7 * full


PLACED = ("whole", "sharded")


def both_placed(places, run, tune, **sections):
    """Return recipes with frozen weights whole on each rank, and sharded."""
    return [
        recipe_of(places, run / placed, {**tune, "base_sharding": placed}, **sections) for placed in PLACED
    ]


OF_HEAD = {**LORA, "rank": 16, "layers": ["query", "unembed"]}
"""The adapter of the output matrix is a quarter of what is learned."""
PLANNED = {
    **{axis: (LORA, axis) for axis in ("shard", "tensor", "context", "pipeline")},
    **{f"{axis}, output matrix": (OF_HEAD, axis) for axis in ("shard", "tensor", "pipeline")},
    "new rows": (LORA, "shard"),
}


@pytest.fixture(scope="module")
def planned(places, tmp_path_factory):
    """Recipes of each case by placement, and what two ranks send that train them in turn."""
    folder = tmp_path_factory.mktemp("planned")
    corpus, base = places
    more = corpus_of(folder / "corpus", named=100)
    # Four blocks where each of them sends: what a step sends once is below the tolerance.
    deep = folder_of(folder / "deep", LlamaConfig(**{**SMALL, "num_hidden_layers": 4}))
    recipes = {
        name: both_placed(
            (more if name == "new rows" else corpus, deep if axis == "tensor" else base),
            folder / str(number),
            tune,
            steps=2,
            parallel={axis: 2},
        )
        for number, (name, (tune, axis)) in enumerate(PLANNED.items())
    }
    batches = RankBatches(
        dict.fromkeys(PLANNED, 2), lambda name, world: [sent(recipe, world)[0] for recipe in recipes[name]]
    )
    return recipes, batches


@pytest.mark.parametrize("case", PLANNED)
def test_the_planned_bytes_of_a_step_are_those_that_are_sent(planned, case):
    """Of 128 rows 64 are new, half of what is learned."""
    recipes, batches = planned
    assert [recipe.adapter.new_rows for recipe in recipes[case]] == [64 if case == "new rows" else 0] * 2
    for placed, recipe, *measured in zip(PLACED, recipes[case], *batches.of(case), strict=True):
        job = replace(job_of(recipe, layout_of(recipe.parallel, world_size=2)), checkpoint_every=0)
        expected = predict(job, TWO_HOSTS).network_bytes
        assert expected == pytest.approx(max(measured), rel=0.1), placed


def test_islands_tune_one_adapter(places, tmp_path):
    """Frozen weights whole on each rank, sharded within an island: the same losses."""
    outer = {"every": 2, "rule": "nesterov"}
    recipes = both_placed(places, tmp_path, LORA, parallel={"replicate": 2, "shard": 2}, outer=outer)
    losses, *_ = on_ranks(lambda world: [sent(recipe, world)[2] for recipe in recipes], ranks=4)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


LEVERS = {
    str(sections): sections
    for sections in (
        {"recompute": {"policy": "full"}},
        {"ethernet": {"schedule": "breadth_first"}},
        {"ethernet": {"keep_mib": 1000.0}},
        {"ethernet": {"overlap": False}},
        {"precision": {"weights": "bfloat16_stochastic"}, "compute": "bfloat16"},
        {"precision": {"weights": "bfloat16_master"}, "compute": "bfloat16"},
        {"compute": "bfloat16", "ethernet": {"gather": "int8", "reduce": "int8"}},
        {"optim": {"rule": "muon"}},
    )
}


@pytest.fixture(scope="module")
def with_levers(places, tmp_path_factory):
    """Losses of two blocks with each lever, by placement of the frozen weights."""
    folder = tmp_path_factory.mktemp("levers")
    two_blocks = {**SMALL, "hidden_size": 64, "intermediate_size": 128}
    base = folder_of(folder / "base", LlamaConfig(**two_blocks))
    tune = {**LORA, "method": "dora"}
    recipes = {
        name: both_placed((places[0], base), folder / str(number), tune, **sections)
        for number, (name, sections) in enumerate(LEVERS.items())
    }
    return RankBatches(
        dict.fromkeys(LEVERS, 2), lambda name, world: [sent(recipe, world)[2] for recipe in recipes[name]]
    )


@pytest.mark.parametrize("lever", LEVERS)
def test_levers_work_with_frozen_weights_sharded_or_whole(with_levers, lever):
    """On two blocks; that a lever changes nothing of more is shown in test_ethernet.py."""
    found, _ = with_levers.of(lever)
    exact = LEVERS[lever].get("compute") != "bfloat16"
    assert found[0] == pytest.approx(found[1], rel=1e-4 if exact else 0.02)
