"""Training with 8-bit linear layers on gloo ranks: near bfloat16, equal on any ranks, half the bytes sent."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rank_batches import RankBatches

from penstock.nn.linear.float8 import RECIPES
from penstock.parallel.ethernet.all_to_all import MESSAGES
from penstock.parallel.mesh import World
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.recipe.config import TrainConfig
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

VOCAB = 50


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [[1 + (start * 7 + 3 * i) % (VOCAB - 1) for i in range(30)] for start in range(200)]
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents, vocab_size=VOCAB)


def raw_recipe(corpus: Path, folder: Path, **sections: Any) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder), "steps": 20, **sections.pop("run", {})},
        "model": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "attention_bias": True,
        },
        "data": {
            "corpora": {"c": {"path": str(corpus)}},
            "sequence_length": 16,
            "global_batch_size": 4,
            **sections.pop("data", {}),
        },
        "optim": {"learning_rate": 3e-3},
        "schedule": {"rule": "constant"},
        **sections,
    }


def losses_of(recipe: TrainConfig, world: World) -> list[float]:
    """Train from where the run stands; return each step's loss."""
    records = records_of(open_state(recipe, world), recipe, world)
    return [record["loss"] for record in records if "loss" in record]


def all_losses(
    corpus: Path, folder: Path, cases: dict[str, dict[str, Any]], *, ranks: int
) -> dict[str, list[float]]:
    """Train once for each case, one after the other in the same processes."""
    recipes = {
        name: build_recipe(raw_recipe(corpus, folder / f"{name}-{ranks}", **sections))
        for name, sections in cases.items()
    }
    batches = RankBatches(dict.fromkeys(recipes, ranks), lambda name, world: losses_of(recipes[name], world))
    found = {name: batches.of(name) for name in recipes}
    assert all(losses == of_ranks[0] for of_ranks in found.values() for losses in of_ranks)
    return {name: of_ranks[0] for name, of_ranks in found.items()}


SENT: dict[str, Any] = {"precision": {"linear": "float8_rowwise"}, "ethernet": {"gather": "float8"}}

CASES: dict[str, dict[str, Any]] = {
    "compute": {},
    **{name: {"precision": {"linear": name}} for name in RECIPES},
    "sent": SENT,
    "sent whole": {"precision": {"linear": "float8_tensorwise"}, "ethernet": {"gather": "float8"}},
}


@pytest.fixture(scope="module")
def two_ranks(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    return all_losses(corpus, tmp_path_factory.mktemp("two"), CASES, ranks=2)


@pytest.mark.parametrize("case", [name for name in CASES if name != "compute"])
def test_losses_stay_within_a_hundredth_of_bfloat16(two_ranks: dict[str, list[float]], case: str) -> None:
    """Over 20 steps, which bring the loss down."""
    expected = two_ranks["compute"]
    assert two_ranks[case] == pytest.approx(expected, abs=1e-2)
    assert two_ranks[case] != expected
    assert expected[-1] < expected[0] - 0.1


def test_weights_sent_in_float8_change_no_bit_of_the_loss(two_ranks: dict[str, list[float]]) -> None:
    assert two_ranks["sent"] == two_ranks["float8_rowwise"]


def test_one_process_and_slices_of_matrices_train_alike(
    corpus: Path, tmp_path: Path, two_ranks: dict[str, list[float]]
) -> None:
    """Scales of a row are those of its slice, and sums have another order: twice the bound to bfloat16."""
    run = {"steps": 8}
    sections = {**SENT, "run": run}
    one = all_losses(corpus, tmp_path, {"one": sections}, ranks=1)["one"]
    assert one == pytest.approx(two_ranks["sent"][:8], abs=1e-2)
    sliced = {**sections, "parallel": {"tensor": 2}}
    four = all_losses(corpus, tmp_path, {"four": sliced}, ranks=4)["four"]
    assert four == pytest.approx(two_ranks["compute"][:8], abs=2e-2)


LAYOUTS: dict[str, dict[str, Any]] = {
    "copies": {"parallel": {"replicate": 4, "shard": 1}},
    "copies of shards": {"parallel": {"replicate": 2, "shard": 2}},
    "slices, recomputed": {"parallel": {"tensor": 2, "shard": 2}, "recompute": {"policy": "full"}},
    "stretches of rows": {"parallel": {"context": 2, "shard": 2}},
    "stages": {"parallel": {"pipeline": 2, "shard": 2}},
}


def test_every_layout_trains_with_weights_sent_in_float8_as_one_process_does(
    corpus: Path, tmp_path: Path
) -> None:
    """1e-3 in float32: sums in another order, and where they tip a rounding, it is one of 8 bits."""
    common: dict[str, Any] = {**SENT, "compute": "float32", "run": {"steps": 4}}
    common["data"] = {"micro_batch_size": 1}
    (expected,) = all_losses(corpus, tmp_path, {"one": common}, ranks=1).values()
    cases = {name: {**common, **sections} for name, sections in LAYOUTS.items()}
    found = all_losses(corpus, tmp_path, cases, ranks=4)
    for name, losses in found.items():
        assert losses == pytest.approx(expected, abs=1e-3), name


def test_one_scale_a_weight_is_found_in_every_layout(corpus: Path, tmp_path: Path) -> None:
    """A slice has a scale of its own, so its losses are those of another rounding."""

    def sections(**others: Any) -> dict[str, Any]:
        one_scale = {"precision": {"linear": "float8_tensorwise"}, "run": {"steps": 4}}
        return {**one_scale, "data": {"micro_batch_size": 1}, **others}

    (expected,) = all_losses(corpus, tmp_path, {"one": sections()}, ranks=1).values()
    same = {
        "shards, recomputed": sections(recompute={"policy": "full"}),
        "offloaded": sections(parallel={"offload": True}),
        "stages": sections(parallel={"pipeline": 2}),
    }
    cases = {**same, "slices": sections(parallel={"tensor": 2})}
    for name, losses in all_losses(corpus, tmp_path, cases, ranks=2).items():
        assert losses == pytest.approx(expected, abs=1e-5 if name in same else 1e-2), name


def test_weights_sent_in_float8_are_half_the_bytes(corpus: Path, tmp_path: Path) -> None:
    """A block: 4 x 32 x 32 + 3 x 32 x 64 weights of 1 byte and 384 exponents; the rest in bfloat16."""

    def gathered(world: World) -> dict[str, int]:
        found = {}
        for gather in ("compute", "float8"):
            raw = raw_recipe(corpus, tmp_path / gather, **{**SENT, "ethernet": {"gather": gather}})
            state = open_state(build_recipe(raw), world)
            before = MESSAGES.sent_bytes.copy()
            with torch.no_grad():
                state.model(torch.ones(1, 4, dtype=torch.int64))
            found[gather] = (MESSAGES.sent_bytes - before).total()
        return found

    for found in on_ranks(gathered, ranks=2):
        weights, rows = 4 * 32 * 32 + 3 * 32 * 64, 4 * 32 + 2 * 64 + 32
        assert found["compute"] - found["float8"] == weights - rows, "of half of each of the two blocks"
