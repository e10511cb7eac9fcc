"""One run through several layouts: what one wrote, any other reads, every bit of weights and moments."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.families import small_llama
from tests.rank_batches import RankBatches
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from penstock.checkpoint.find import find
from penstock.checkpoint.layout import Meta
from penstock.checkpoint.load import load_into
from penstock.checkpoint.saver import RetentionPolicy, Saver
from penstock.checkpoint.storage import place_in
from penstock.checkpoint.tensors import held, training_tensors
from penstock.checkpoint.write_plan import SPLIT_BYTES
from penstock.parallel.mesh import World
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.recipe.config import TrainConfig
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

MODEL = small_llama()
Whole = dict[str, Tensor]


def meta_of(step: int) -> Meta:
    return Meta(step=step, tokens=1, model=MODEL, loader={}, seed=0, world_size=4)


def whole(tensors: dict[str, Tensor]) -> Whole:
    return {
        n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [[1 + (i * j) % 47 for j in range(1 + i % 50)] for i in range(300)]
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents, vocab_size=48)


def recipe_of(corpus: Path, run: Path, *, tied: bool = False) -> TrainConfig:
    return build_recipe(
        {
            "run": {"dir": str(run), "steps": 6},
            "model": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "tie_word_embeddings": tied,
            },
            "data": {
                "corpora": {"c": {"path": str(corpus)}},
                "sequence_length": 24,
                "global_batch_size": 8,
                "micro_batch_size": 1,
                "num_workers": 0,
            },
            "checkpoint": {"keep": 9},
            "compute": "float32",
        }
    )


def in_layout(recipe: TrainConfig, world: World, *, steps: int, **parallel: int) -> tuple[Whole, Whole]:
    """Go on with a run in a layout for some steps; return its state as resumed and as saved."""
    torch.set_num_threads(1)
    recipe = dataclasses.replace(recipe, parallel=dataclasses.replace(recipe.parallel, **parallel))
    state = open_state(recipe, world)
    resumed = whole(training_tensors(state.model, state.optimizer))
    if steps:
        records_of(state, recipe, world, stop_at=state.step + steps)
    return resumed, whole(training_tensors(state.model, state.optimizer))


def merged(of_ranks: Iterable[Whole]) -> Whole:
    """Put together what the stages of a pipeline hold."""
    return {name: tensor for each in of_ranks for name, tensor in each.items()}


def equal(a: Whole, b: Whole) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_a_run_moves_from_shards_to_slices_to_stages_to_one_process_with_every_bit(
    corpus: Path, tmp_path: Path
) -> None:
    """Four ranks in four layouts in turn; then eight and one, which are new processes."""
    recipe = recipe_of(corpus, tmp_path / "run")
    layouts: list[tuple[int, dict[str, int]]] = [
        (2, {}),
        (1, {"tensor": 2}),
        (1, {"tensor": 2, "replicate": 2}),
        (1, {"pipeline": 2}),
    ]
    of_ranks = on_ranks(
        lambda world: [in_layout(recipe, world, steps=steps, **parallel) for steps, parallel in layouts],
        ranks=4,
    )
    shards, slices, hybrid, staged = zip(*of_ranks, strict=True)
    for before, after in ((shards, slices), (slices, hybrid)):
        for resumed, _ in after:
            equal(resumed, before[0][1])
    equal(merged(resumed for resumed, _ in staged), hybrid[0][1])
    cube = on_ranks(lambda world: in_layout(recipe, world, steps=1, pipeline=2, tensor=2), ranks=8)
    equal(merged(resumed for resumed, _ in cube), merged(saved for _, saved in staged))
    ((alone, _),) = on_ranks(lambda world: in_layout(recipe, world, steps=0), ranks=1)
    equal(alone, merged(saved for _, saved in cube))
    assert any(name.startswith("optimizer.") for name in alone)


def test_a_matrix_of_two_stages_stays_equal_is_saved_once_and_found_by_both(
    corpus: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(corpus, tmp_path / "run", tied=True)
    found = on_ranks(lambda world: in_layout(recipe, world, steps=2, pipeline=2), ranks=2)
    (_, first), (_, last) = found
    both = first.keys() & last.keys()
    assert {"model.embed.weight", "optimizer.embed.weight.exp_avg"} <= both
    equal({name: first[name] for name in both}, {name: last[name] for name in both})
    files = find(tmp_path / "run").index().files.values()
    saved = sum(entry.num_bytes - entry.header_bytes for entry in files)
    assert saved == sum(tensor.nbytes for tensor in merged(saved for _, saved in found).values())
    ((alone, _),) = on_ranks(lambda world: in_layout(recipe, world, steps=0), ranks=1)
    equal(alone, merged(saved for _, saved in found))


def spread(kind: str) -> dict[str, Tensor]:
    """Large tensors on a mesh of 2 x 2, in a layout; the values tell the place."""
    placements: dict[str, Any] = {
        "copies": [Replicate(), Replicate()],
        "hybrid": [Replicate(), Shard(0)],
        "columns": [Shard(0), Shard(1)],
        "twice the same dim": [Shard(0), Shard(0)],
    }
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    values = {f"t{n}": torch.arange(n * 7 * 9_000.0).view(n * 7, 9_000) for n in (1, 2, 3)}
    spread = {name: distribute_tensor(value, mesh, placements[kind]) for name, value in values.items()}
    return {
        **spread,
        "plain": torch.arange(5),
        "step": torch.tensor(4.0),
        "byte": torch.ones(3, dtype=torch.uint8),
    }


KINDS = ["copies", "hybrid", "columns", "twice the same dim"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RankBatches[None]]:
    """A folder, in which ranks save each kind in one of its name, and read it as every other kind."""
    folder = tmp_path_factory.mktemp("written")

    def work(kind: str, _: World) -> None:
        tensors = spread(kind)
        with Saver(place_in(folder / kind, ""), RetentionPolicy()) as saver:
            saver.save(tensors, meta_of(1))
        for other in KINDS:
            found = {name: torch.zeros_like(tensor) for name, tensor in spread(other).items()}
            load_into(find(folder / kind), found)
            equal(whole(found), whole(tensors))

    return folder, RankBatches(dict.fromkeys(KINDS, 4), work)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_written_once_by_even_shares_and_read_in_every_other_layout(
    written: tuple[Path, RankBatches[None]], kind: str
) -> None:
    folder, batches = written
    batches.of(kind)
    index = find(folder / kind).index()
    sizes = [entry.num_bytes - entry.header_bytes for entry in index.files.values()]
    assert sum(sizes) == 42 * 9_000 * 4 + 5 * 8 + 4 + 3, "each byte once"
    assert len(sizes) == 4
    # what is cut unevenly is held unevenly: 7 rows over 4 ranks are 2, 2, 2, 1
    spare = {
        "copies": 2 * SPLIT_BYTES,
        "hybrid": 4 * 36_000,
        "columns": 4 * 36_000,
        "twice the same dim": 6 * 36_000,
    }
    assert max(sizes) - min(sizes) <= spare[kind], sizes


def test_the_box_of_a_shard_is_where_torch_puts_it() -> None:
    def work(_: World) -> None:
        for kind in KINDS:
            for name, tensor in spread(kind).items():
                box, local = held(name, tensor)
                full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                here = full[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
                assert torch.equal(here, local), (kind, name)

    on_ranks(work, ranks=4)


def test_what_is_saved_is_the_moment_of_the_call_not_of_the_writing(tmp_path: Path) -> None:
    def work(_: World) -> None:
        tensors = {"w": torch.full((64, 64), 1.0)}
        with Saver(place_in(tmp_path, ""), RetentionPolicy(newest=9)) as saver:
            for step in (1, 2, 3):
                tensors["w"].fill_(step)
                saver.save(tensors, meta_of(step))
                tensors["w"].fill_(-1)  # training goes on

    on_ranks(work, ranks=2)
    for step in (1, 2, 3):
        for path in Path(str(find(tmp_path, step=step))).glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    assert (file.get_tensor(name) == step).all()
