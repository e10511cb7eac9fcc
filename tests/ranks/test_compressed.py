"""Weights and gradients sent in fewer bits on gloo ranks: what is lost, what is saved, what still holds."""

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rank_batches import RankBatches

from penstock.core.errors import ConfigError
from penstock.parallel.ethernet import async_collectives
from penstock.parallel.ethernet.all_to_all import MESSAGES
from penstock.parallel.ethernet.codecs import Encoder
from penstock.parallel.ethernet.wire_size import encoded_bytes
from penstock.parallel.flight_recorder import TrafficMeter
from penstock.parallel.layout import layout_of
from penstock.parallel.mesh import World
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.monitors.step_monitors import StepMonitors
from penstock.train.planning.memory import memory_plan
from penstock.train.recipe.config import TrainConfig
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

VOCAB = 64
STEPS = 12
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": VOCAB,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [[1 + (start * 7 + 3 * i) % (VOCAB - 1) for i in range(30)] for start in range(200)]
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents, vocab_size=VOCAB)


def recipe(corpus: Path, folder: Path, **sections: Any) -> TrainConfig:
    raw: dict[str, Any] = {
        "run": {"dir": str(folder), "steps": STEPS, **sections.pop("run", {})},
        "model": SHAPE,
        "data": {
            "corpora": {"c": {"path": str(corpus)}},
            "sequence_length": 16,
            "global_batch_size": 8,
            "micro_batch_size": 1,
            **sections.pop("data", {}),
        },
        "optim": {"learning_rate": 3e-3},
        "schedule": {"rule": "constant"},
        "compute": "float32",
        **sections,
    }
    return build_recipe(raw)


def trained(config: TrainConfig, world: World) -> dict[str, Any]:
    """Train; return each step's loss, the first gradient's norm and what a step sent on each axis."""
    state = open_state(config, world)
    state.watch = StepMonitors(traffic=TrafficMeter(state.mesh))
    records = records_of(state, config, world)
    steps = [record for record in records if "loss" in record]
    (sent,) = [record["sent_bytes"] for record in records if record.get("event") == "traffic"]
    return {"losses": [step["loss"] for step in steps], "norm": steps[0]["grad_norm"], "sent": sent}


def train_all(corpus: Path, folder: Path, cases: dict[str, Any], *, ranks: int) -> dict[str, dict[str, Any]]:
    """Train once for each case, one after the other in the same processes."""
    recipes = {
        name: recipe(corpus, folder / f"{index}", **sections)
        for index, (name, sections) in enumerate(cases.items())
    }
    batches = RankBatches(dict.fromkeys(recipes, ranks), lambda name, world: trained(recipes[name], world))
    found = {name: batches.of(name) for name in recipes}
    for name, of_ranks in found.items():
        assert all(of_rank["losses"] == of_ranks[0]["losses"] for of_rank in of_ranks), name
    return {name: of_ranks[0] for name, of_ranks in found.items()}


PLAIN = "as it is"
CASES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    **{f"gather {codec}": {"gather": codec} for codec in ("bfloat16", "int8", "float8")},
    **{f"reduce {codec}": {"reduce": codec} for codec in ("bfloat16", "int8", "float8")},
    "reduce int8, fed back": {"reduce": "int8", "feedback": True},
    "both int8": {"gather": "int8", "reduce": "int8"},
    "both int8, kept": {"gather": "int8", "reduce": "int8", "feedback": True, "keep_mib": math.inf},
}
DRIFTS = {
    "gather bfloat16": 1e-3,
    "gather int8": 3e-3,
    "gather float8": 1e-2,
    "reduce bfloat16": 5e-4,
    "reduce int8": 5e-3,
    "reduce float8": 5e-3,
    "reduce int8, fed back": 3e-3,
    "both int8": 5e-3,
    "both int8, kept": 5e-3,
}
"""How far any loss of 12 steps that bring it down by more than 1 may be from that of float32, in nats: two
to ten times what was found, since another machine sums in another order."""


OF_SHARDS = tuple(CASES)
# Gathers stay inside of a copy; that float8 rounds as it should is shown on shards.
OF_COPIES = (PLAIN, "reduce bfloat16", "reduce int8, fed back", "both int8, kept")


@pytest.mark.parametrize(
    ("ranks", "parallel", "names"),
    [(2, {}, OF_SHARDS), (4, {"replicate": 2}, OF_COPIES)],
    ids=["2 shards", "2 copies of 2 shards"],
)
def test_each_codec_stays_near_float32_and_sends_fewer_bytes(
    corpus: Path, tmp_path: Path, ranks: int, parallel: dict[str, int], names: tuple[str, ...]
) -> None:
    """In two micro-batches a step. One test, since each run is paid for once."""
    common = {"parallel": parallel, "data": {"micro_batch_size": 4 // ranks}}
    cases = {name: {"ethernet": CASES[name], **common} for name in names}
    found = train_all(corpus, tmp_path, cases, ranks=ranks)
    plain = found.pop(PLAIN)
    assert plain["losses"][-1] < plain["losses"][0] - 1.0
    for name, case in found.items():
        assert case["losses"] != plain["losses"], f"{name}: nothing was rounded"
        assert case["losses"] == pytest.approx(plain["losses"], abs=DRIFTS[name]), name
        check_norm(name, case, plain)
        check_bytes(name, case, plain)


def check_norm(name: str, case: dict[str, Any], plain: dict[str, Any]) -> None:
    """AdamW would not notice a gradient of another scale. Roundings of 3% of each number are independent."""
    assert case["norm"] != plain["norm"], name
    assert case["norm"] == pytest.approx(plain["norm"], rel=3e-3), name


def check_bytes(name: str, case: dict[str, Any], plain: dict[str, Any]) -> None:
    """Between copies nothing but gradients goes: a half, and a quarter with the scales and a last block."""
    assert case["sent"]["shard"] < 0.9 * plain["sent"]["shard"], name
    if "replicate" in plain["sent"] and "gather" not in name:
        share = 0.5 if "bfloat16" in name else 0.28
        assert case["sent"]["replicate"] <= share * plain["sent"]["replicate"], name


def test_a_reduction_weighs_what_its_codec_says(corpus: Path, tmp_path: Path) -> None:
    """Of two steps of four micro-batches: half of the root's and of each block's gradients."""

    def reduced(world: World) -> dict[str, tuple[int, int]]:
        found = {}
        for codec in ("float32", "bfloat16", "int8", "float8"):
            sections: dict[str, Any] = {"ethernet": {"reduce": codec}, "run": {"steps": 2}}
            config = recipe(corpus, tmp_path / codec, **sections)
            state = open_state(config, world)
            before = MESSAGES.sent_bytes.copy()
            records_of(state, config, world)
            told = (MESSAGES.sent_bytes - before).total()
            layers = [sum(p.numel() for p in layer.parameters()) for layer in state.model.layers]
            outside = sum(p.numel() for p in state.model.parameters()) - sum(layers)
            expected = sum(encoded_bytes(numbers // 2, codec) for numbers in (outside, *layers))
            found[codec] = told, 2 * 4 * expected
        return found

    for found in on_ranks(reduced, ranks=2):
        plain = found["float32"]  # what else is sent is the same: gathers
        for codec, (told, expected) in found.items():
            assert told - plain[0] == expected - plain[1], codec


def test_gradients_cut_for_several_cards_have_remainders_of_their_own(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of at least 1,000 numbers, so that a tiny model has several."""
    monkeypatch.setattr(async_collectives, "LEAST", 1000)
    ethernet = {"reduce": "int8", "feedback": True}
    cases = {
        "whole": {"ethernet": {**ethernet, "operations": 1}, "run": {"steps": 4}},
        "cut": {"ethernet": {**ethernet, "operations": 3}, "run": {"steps": 4}},
    }
    found = train_all(corpus, tmp_path, cases, ranks=2)
    assert found["cut"]["losses"] != found["whole"]["losses"], "blocks begin elsewhere"
    assert found["cut"]["losses"] == pytest.approx(found["whole"]["losses"], abs=2e-3)


def test_copies_of_bfloat16_weights_agree_once_a_step_too(corpus: Path, tmp_path: Path) -> None:
    """FSDP2 rounds the sum of each micro-batch, so it cannot wait; ours is kept in float32 until the last."""
    cases: dict[str, Any] = {}
    for parallel in ({"shard": 2, "replicate": 2}, {"shard": 1, "replicate": 4}):
        plain = {"parallel": parallel, "precision": {"weights": "bfloat16_master"}, "run": {"steps": 4}}
        cases[f"{parallel}"] = plain
        cases[f"{parallel}, encoded"] = {**plain, "ethernet": {"reduce": "int8"}}
    runs = train_all(corpus, tmp_path, cases, ranks=4)
    for name in [*cases][::2]:
        unencoded, encoded = runs[name], runs[f"{name}, encoded"]
        assert encoded["losses"] == pytest.approx(unencoded["losses"], abs=1e-2), "weights have 8 bits"
        check_norm(name, encoded, unencoded)
        assert encoded["sent"]["replicate"] <= 0.28 * unencoded["sent"]["replicate"], name


@pytest.mark.parametrize("parallel", [{"shard": 2}, {"shard": 1, "replicate": 2}])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(
    corpus: Path, tmp_path: Path, parallel: dict[str, int]
) -> None:
    """One number of one rank, in the third step; what was left over from it spoils no later one."""
    ethernet = {"reduce": "int8", "feedback": True}
    config = recipe(corpus, tmp_path, ethernet=ethernet, parallel=parallel, run={"steps": 6})

    def spoiled(world: World) -> tuple[list[int], list[float]]:
        state = open_state(config, world)

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            gradient[0, 0, 0] = math.inf
            return gradient

        def watch(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
            del module, inputs
            if state.step == 3 and world.ranks.rank == 1 and output.requires_grad:
                output.register_hook(spoil)

        state.model.layers[0].register_forward_hook(watch)
        records = records_of(state, config, world)
        skipped = [record["step"] for record in records if record.get("event") == "skipped"]
        return skipped, [record["loss"] for record in records if "loss" in record]

    for skipped, losses in on_ranks(spoiled, ranks=2):
        assert skipped == [3]
        assert len(losses) == 5
        assert all(map(math.isfinite, losses))
        assert losses[-1] < losses[0]


def test_a_gather_weighs_what_its_codec_says(corpus: Path, tmp_path: Path) -> None:
    """Matrices do; norms are sent as they are."""

    def gathered(world: World) -> dict[str, tuple[int, int]]:
        found = {}
        for codec in ("bfloat16", "int8", "float8"):
            state = open_state(recipe(corpus, tmp_path / codec, ethernet={"gather": codec}), world)
            before = MESSAGES.sent_bytes.copy()
            with torch.no_grad():
                state.model(torch.ones(1, 4, dtype=torch.int64))
            told = (MESSAGES.sent_bytes - before).total()
            expected = sum(
                encoded_bytes(weight.numel() // 2, codec if weight.ndim > 1 else "float32")
                for weight in state.model.parameters()
            )
            found[codec] = told, expected
        return found

    for found in on_ranks(gathered, ranks=2):
        for codec, (told, expected) in found.items():
            assert told == expected, codec


def test_remainders_take_what_the_memory_plan_says(corpus: Path, tmp_path: Path) -> None:
    """Within 1%: of copies, whose parts are padded."""
    layouts: list[dict[str, int]] = [{}, {"replicate": 2}, {"shard": 1, "replicate": 4}, {"tensor": 2}]
    ethernet = {"reduce": "int8", "feedback": True}
    configs = [
        recipe(corpus, tmp_path / str(number), ethernet=ethernet, parallel=parallel, run={"steps": 1})
        for number, parallel in enumerate(layouts)
    ]

    def kept(config: TrainConfig, world: World) -> int:
        gc.collect()
        earlier = [one.num_kept_bytes for one in gc.get_objects() if type(one) is Encoder]
        assert not earlier, "the run before is gone"
        state = open_state(config, world)
        records_of(state, config, world)
        return sum(one.num_kept_bytes for one in gc.get_objects() if type(one) is Encoder)

    for found in on_ranks(lambda world: [kept(config, world) for config in configs], ranks=4):
        for config, measured in zip(configs, found, strict=True):
            planned = memory_plan(config, layout_of(config.parallel, world_size=4)).feedback
            assert measured == pytest.approx(planned, rel=0.01), config.parallel


TWO_ROWS = {"micro_batch_size": 2}  # for two micro-batches a step in layouts of two data-parallel ranks
LAYOUTS: dict[str, dict[str, Any]] = {
    "copies": {"parallel": {"replicate": 4, "shard": 1}},
    "slices, recomputed": {
        "parallel": {"tensor": 2, "shard": 2},
        "recompute": {"policy": "full"},
        "data": TWO_ROWS,
    },
    "stretches of rows": {"parallel": {"context": 2, "shard": 2}, "data": TWO_ROWS},
    "stages": {"parallel": {"pipeline": 2, "shard": 2}, "data": TWO_ROWS},
    "bfloat16 weights, which cannot wait": {"precision": {"weights": "bfloat16_master"}},
    "rows that ranks do not share evenly": {"model": {**SHAPE, "vocab_size": VOCAB + 1}},
}


def test_every_layout_trains_with_fewer_bits(corpus: Path, tmp_path: Path) -> None:
    """Against float32 of the same layout: the second loss follows from the first gradients."""
    few = {"run": {"steps": 2}}
    cases = {name: {**sections, **few} for name, sections in LAYOUTS.items()}
    fewer = {
        f"{name}, fewer": {**sections, "ethernet": {"gather": "int8", "reduce": "int8"}}
        for name, sections in cases.items()
    }
    found = train_all(corpus, tmp_path, {**cases, **fewer}, ranks=4)
    for name in LAYOUTS:
        losses = found[f"{name}, fewer"]["losses"]
        assert losses == pytest.approx(found[name]["losses"], abs=DRIFTS["both int8"]), name
        assert found[f"{name}, fewer"]["norm"] == pytest.approx(found[name]["norm"], rel=3e-3), name


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"offload": True}, r"ethernet.gather 'int8' does not work with parallel.offload \(got True\)"),
        ({"hierarchy": "hpz"}, r"ethernet.gather 'int8' does not work with parallel.hierarchy 'hpz'"),
        ({"reshard_after_forward": 2}, r"reshard_after_forward to be true or false \(got 2\)"),
    ],
)
def test_what_weights_cannot_be_gathered_in_fewer_bits_with_is_refused(
    corpus: Path, tmp_path: Path, parallel: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe(corpus, tmp_path, ethernet={"gather": "int8"}, parallel=parallel)
