"""Every rule on sharded weights: what whole ones get, and what a run gets that was never stopped."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rank_batches import RankBatches
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from penstock.core.errors import CheckpointError, ConfigError
from penstock.parallel.mesh import World
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.optim.optimizer import build_optimizer
from penstock.train.optim.weight_storage import STORAGES
from penstock.train.recipe.config import TrainConfig, Weights
from penstock.train.recipe.optim_config import OptimConfig, OptimizerName
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

RULES: list[OptimizerName] = ["adamw", "adamw_8bit", "muon"]
CASES: list[tuple[OptimizerName, Weights]] = [
    *((rule, "float32") for rule in RULES),
    ("adamw", "bfloat16_master"),
    ("muon", "bfloat16_master"),
    ("adamw", "bfloat16_stochastic"),
    ("adamw_8bit", "bfloat16_stochastic"),
]
MUON = CASES[2]
VOCAB, STEPS = 50, 4


class Blocks(nn.Module):
    """Matrices of several shapes, none of whose rows divide by 4, as blocks of a model."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(34, 150), (150, 34), (66, 66), (2, 9), (30, 258)]
        self.layers = nn.ModuleList(nn.Linear(columns, rows) for rows, columns in shapes)


def stepped(rule: OptimizerName, *, place: Any, weights: Weights = "float32") -> dict[str, Tensor]:
    """Take two steps from the same weights and gradients; return weights and states, whole.

    Args:
        place: puts a whole tensor on the ranks.
    """
    generator = torch.Generator().manual_seed(0)
    model = Blocks()
    for layer in model.layers:
        for name, parameter in list(layer.named_parameters()):
            value = torch.randn(parameter.shape, generator=generator)
            setattr(layer, name, nn.Parameter(place(value.to(STORAGES[weights].dtype))))
    optimizer = build_optimizer(model, OptimConfig(rule=rule, learning_rate=0.01), weights=weights, seed=3)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = place(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        optimizer.step()
    found = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}  # type: ignore[misc]
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in found.items()
    }


def check_close(found: dict[str, Tensor], whole: dict[str, Tensor]) -> None:
    """1e-5 of float32 that moved by 3e-2: its last bits and, of a few directions, those of bfloat16.

    A number that ends a hair from a border may go to the other side: one code, or one bfloat16.

    Kernels take the last numbers of a row by other instructions than the rest, and shards end elsewhere.
    """
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        step = {torch.uint8: 1.0, torch.bfloat16: 2**-6}.get(tensor.dtype, 1e-5)
        torch.testing.assert_close(found[name].float(), tensor.float(), rtol=0, atol=step)
        differ = (found[name] != tensor).double().mean()
        assert differ < 0.01 or tensor.dtype == torch.float32, (name, differ)


LAYOUTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "2 shards": ((2,), [Shard(0)]),
    "4 shards": ((4,), [Shard(0)]),
    "2 replicas of 2 shards": ((2, 2), [Replicate(), Shard(0)]),
    "2 x 2 shards of rows": ((2, 2), [Shard(0), Shard(0)]),
}
BOTH_WAYS = "2 x 2 shards of rows and columns"


@pytest.fixture(scope="module")
def whole() -> list[dict[str, Tensor]]:
    """What each case gives whole weights."""

    def alone(_: World) -> list[dict[str, Tensor]]:
        return [stepped(rule, place=lambda t: t, weights=weights) for rule, weights in CASES]

    (found,) = on_ranks(alone, ranks=1)
    return found


@pytest.fixture(scope="module")
def sharded() -> RankBatches[list[dict[str, Tensor]]]:
    """What each case gives sharded weights, by layout; matrices cut both ways are Muon's alone."""
    layouts = LAYOUTS | {BOTH_WAYS: ((2, 2), [Shard(0), Shard(1)])}

    def work(layout: str, _: World) -> list[dict[str, Tensor]]:
        shape, placements = layouts[layout]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])

        def cut(value: Tensor) -> Tensor:
            vectors = [Shard(0), Replicate()]
            return distribute_tensor(
                value, mesh, vectors if layout == BOTH_WAYS and value.ndim == 1 else placements
            )

        cases = [MUON] if layout == BOTH_WAYS else CASES
        return [stepped(rule, place=cut, weights=weights) for rule, weights in cases]

    return RankBatches({layout: math.prod(shape) for layout, (shape, _) in layouts.items()}, work)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_weights_get_what_whole_ones_get(
    layout: str, sharded: RankBatches[list[dict[str, Tensor]]], whole: list[dict[str, Tensor]]
) -> None:
    for found in sharded.of(layout):
        for mine, expected in zip(found, whole, strict=True):
            check_close(mine, expected)


def test_muon_works_on_blocks_cut_both_ways(
    sharded: RankBatches[list[dict[str, Tensor]]], whole: list[dict[str, Tensor]]
) -> None:
    for (found,) in sharded.of(BOTH_WAYS):
        check_close(found, whole[CASES.index(MUON)])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [[1 + (start * 7 + 3 * i) % (VOCAB - 1) for i in range(30)] for start in range(200)]
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents, vocab_size=VOCAB)


def recipe_of(corpus: Path, folder: Path, **sections: dict[str, object]) -> TrainConfig:
    return build_recipe(
        {
            "run": {"dir": str(folder), "steps": STEPS},
            "model": {
                "hidden_size": 64,
                "intermediate_size": 80,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
            "data": {
                "corpora": {"c": {"path": str(corpus)}},
                "sequence_length": 16,
                "global_batch_size": 4,
            },
            "compute": "float32",
            "schedule": {"rule": "constant"},
            **sections,
        }
    )


def losses_of(recipe: TrainConfig, world: World, *, stop_at: int = 99) -> list[tuple[float, float]]:
    """Train from where the run stands; return each step's loss and gradient norm."""
    records = records_of(open_state(recipe, world), recipe, world, stop_at=stop_at)
    return [(r["loss"], r["grad_norm"]) for r in records if "loss" in r]


Losses = list[tuple[float, float]]
TOGETHER = {f"{rule}, {weights}": (rule, weights) for rule, weights in CASES}


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RankBatches[list[Losses]]:
    """What runs of each case learn: on two ranks stopped and not, and alone."""
    folder = tmp_path_factory.mktemp("runs")

    def of(name: str, kind: str) -> TrainConfig:
        rule, weights = TOGETHER[name]
        sections = {"optim": {"rule": rule, "learning_rate": 3e-3}, "precision": {"weights": weights}}
        return recipe_of(corpus, folder / kind / name, **sections)

    def work(case: str, world: World) -> list[Losses]:
        if case not in TOGETHER:
            return [losses_of(of(case.removesuffix(", alone"), "alone"), world)]
        stopped = losses_of(of(case, "stopped"), world, stop_at=2) + losses_of(of(case, "stopped"), world)
        return [stopped, losses_of(of(case, "whole"), world)]

    return RankBatches(dict.fromkeys(TOGETHER, 2) | {f"{name}, alone": 1 for name in TOGETHER}, work)


@pytest.mark.parametrize("case", TOGETHER)
def test_a_stopped_run_goes_on_with_every_bit_and_ranks_do_not_matter(
    runs: RankBatches[list[Losses]], case: str
) -> None:
    """1e-5 between numbers of ranks: sums of float32 in another order; 2e-3 where some state has few bits."""
    (stopped, whole), _ = runs.of(case)
    assert len(whole) == STEPS
    assert stopped == whole
    ((one,),) = runs.of(f"{case}, alone")
    tolerance = 1e-5 if TOGETHER[case] == ("adamw", "float32") else 2e-3
    assert [loss for loss, _ in whole] == pytest.approx([loss for loss, _ in one], abs=tolerance)
    assert whole[-1][0] < whole[0][0]


def of_8_bits(corpus: Path, folder: Path, **more: object) -> TrainConfig:
    model = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    optim = {"rule": "adamw_8bit", "learning_rate": 1e-3}
    run = {"dir": str(folder), "steps": 6}
    return recipe_of(corpus, folder, run=run, model=model, optim=optim, **more)  # type: ignore[arg-type]


def moments(world: World, found: TrainConfig) -> dict[str, Tensor]:
    state = open_state(found, world)
    return {
        f"{name}.{key}": (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, parameter in state.model.named_parameters()
        for key, value in state.optimizer.state[parameter].items()
    }


@pytest.fixture(scope="module")
def half(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor], Losses]:
    """A run of one rank that stopped after three of six steps, its moments, and the losses of a whole one."""
    folder = tmp_path_factory.mktemp("half")
    recipe, whole = (of_8_bits(corpus, folder / name) for name in ("half", "whole"))

    def work(world: World) -> tuple[dict[str, Tensor], Losses]:
        losses_of(recipe, world, stop_at=3)
        return moments(world, recipe), losses_of(whole, world)

    ((before, losses),) = on_ranks(work, ranks=1)
    return folder / "half", before, losses


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}, {"replicate": 2, "shard": 1}])
def test_8_bit_moments_come_through_a_change_of_layout_bit_for_bit(
    corpus: Path,
    half: tuple[Path, dict[str, Tensor], Losses],
    tmp_path: Path,
    parallel: dict[str, object],
) -> None:
    """What drifts later is the rounding of sums: losses of the first steps are equal to 1e-5."""
    run, before, whole = half
    assert sum(key.endswith("_codes") and bool(value.unique().numel() > 9) for key, value in before.items())
    shutil.copytree(run, tmp_path / "run")
    changed = of_8_bits(corpus, tmp_path / "run", parallel=parallel)

    def work(world: World) -> tuple[dict[str, Tensor], Losses]:
        return moments(world, changed), losses_of(changed, world)

    for after, rest in on_ranks(work, ranks=2):
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert [loss for loss, _ in rest] == pytest.approx([loss for loss, _ in whole[3:]], abs=1e-5)


def test_a_run_is_not_resumed_with_the_states_of_another_rule(corpus: Path, tmp_path: Path) -> None:
    def refused(world: World) -> dict[tuple[str, str], str]:
        found = {}
        for before in RULES:
            folder = tmp_path / before
            losses_of(recipe_of(corpus, folder, optim={"rule": before}), world, stop_at=1)
            for after in RULES:
                try:
                    open_state(recipe_of(corpus, folder, optim={"rule": after}), world)
                except CheckpointError as error:
                    found[before, after] = str(error)
        return found

    (said,) = on_ranks(refused, ranks=1)
    assert said.keys() == {(before, after) for before in RULES for after in RULES if before != after}
    for sentence in said.values():
        assert "has no optimizer." in sentence
        assert "Resume with the model and optimizer it was saved with" in sentence


def test_slices_that_cut_a_block_of_8_bit_moments_are_refused(corpus: Path, tmp_path: Path) -> None:
    sections = {"optim": {"rule": "adamw_8bit"}, "parallel": {"tensor": 2}}
    with pytest.raises(
        ConfigError, match=r"for each 128 columns, and parallel.tensor cuts 64 columns into 32 a"
    ):
        recipe_of(corpus, tmp_path, **sections)


def test_slices_of_matrices_train_as_one_process_does(corpus: Path, tmp_path: Path) -> None:
    """Two ranks cut each matrix one way and two the other; 2e-3: momentum in bfloat16, states of 8 bits."""
    model = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    cases: list[tuple[OptimizerName, Weights]] = [
        ("muon", "float32"),
        ("adamw_8bit", "float32"),
        ("adamw", "bfloat16_stochastic"),
    ]

    def all_of(world: World) -> list[list[float]]:
        losses = []
        for rule, weights in cases:
            recipe = recipe_of(
                corpus,
                tmp_path / f"{rule}-{world.ranks.world_size}",
                model=model,
                run={"dir": str(tmp_path / f"{rule}-{world.ranks.world_size}"), "steps": 5},
                optim={"rule": rule, "learning_rate": 1e-3},
                precision={"weights": weights},
                parallel={"tensor": 2 if world.ranks.world_size > 1 else 1},
            )
            losses.append([loss for loss, _ in losses_of(recipe, world)])
        return losses

    (one,) = on_ranks(all_of, ranks=1)
    for four in on_ranks(all_of, ranks=4):
        for found, expected in zip(four, one, strict=True):
            assert found == pytest.approx(expected, abs=2e-3)
            assert expected[-1] < expected[0]
