"""Checkpoints across numbers of ranks: every bit comes back, every damage is named, nothing is left over."""

import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.checkpoint import saver as saver_module
from penstock.checkpoint.find import find, saved_of
from penstock.checkpoint.layout import Meta
from penstock.checkpoint.load import load_into
from penstock.checkpoint.open_model import open_model
from penstock.checkpoint.resume import agreed
from penstock.checkpoint.saver import RetentionPolicy, Saver
from penstock.checkpoint.storage import place_in
from penstock.checkpoint.tensors import training_tensors
from penstock.core.errors import CheckpointError
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.models.decoder.tensor_slices import TensorParallelRank, slice_of
from penstock.nn.init import init_weights
from penstock.parallel.layout import RankLayout
from penstock.parallel.mesh import World, make_mesh
from penstock.parallel.sharding.fsdp import shard
from penstock.testing.ranks import on_ranks
from penstock.train.optim.optimizer import build_optimizer
from penstock.train.recipe.optim_config import OptimConfig

# No dimension divides by 2, 3 or 4, and a norm of 10 leaves some of 4 ranks less than others.
MODEL = DecoderConfig(
    vocab_size=37,
    hidden_size=10,
    intermediate_size=7,
    num_hidden_layers=2,
    num_attention_heads=5,
    num_key_value_heads=1,
    max_position_embeddings=16,
)


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def meta_of(step: int) -> Meta:
    return Meta(step=step, tokens=step * 100, model=MODEL, loader={"v": 1}, seed=5, world_size=2)


def sharded_tensors(world: World, *, seed: int, stepped: bool) -> dict[str, Tensor]:
    """Return the live training tensors of a sharded model, after one optimizer step where asked for."""
    with torch.device("meta"):
        model = Decoder(MODEL)
    mesh = make_mesh(world, RankLayout(shard=world.ranks.world_size)).data
    shard(model, mesh, compute_dtype=torch.float32)
    model.to_empty(device=world.device)
    init_weights(model, seed=seed)
    optimizer = build_optimizer(model, OptimConfig(learning_rate=0.1))
    if stepped:
        ids = (torch.arange(32).view(2, 16) * 7) % 37
        model(ids).square().mean().backward()
        optimizer.step()
    return training_tensors(model, optimizer)


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in tensors.items()
    }


def save_steps(run: Path, *steps: int, keep: int = 9) -> Callable[[World], dict[str, Tensor]]:
    """Return work for a rank: save checkpoints of these steps; what was saved, whole, is its result."""

    def work(world: World) -> dict[str, Tensor]:
        tensors = sharded_tensors(world, seed=5, stepped=True)
        with Saver(place_in(run, ""), RetentionPolicy(newest=keep)) as saver:
            for step in steps:
                saver.save(tensors, meta_of(step))
        return whole(tensors)

    return work


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A run with one checkpoint written by two ranks, and what is in it; not to be written to."""
    run = tmp_path_factory.mktemp("run")
    first, second = on_ranks(save_steps(run, 3), ranks=2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    return run, first


@pytest.fixture
def copy(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> Path:
    """A copy of that run, to be damaged."""
    shutil.copytree(saved[0], tmp_path / "run")
    return tmp_path / "run"


def loading(run: Path) -> Callable[[World], tuple[str, dict[str, Tensor]]]:
    """Return work for a rank: load into other weights; its result is what was refused, or what it has now."""

    def work(world: World) -> tuple[str, dict[str, Tensor]]:
        tensors = sharded_tensors(world, seed=6, stepped=False)
        if failure := agreed(lambda: load_into(find(run), tensors)):
            return str(failure), {}
        return "", whole(tensors)

    return work


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_weights_and_moments_written_by_two_ranks_are_read_by_any_number_bit_for_bit(
    saved: tuple[Path, dict[str, Tensor]], ranks: int
) -> None:
    run, expected = saved
    kinds = {name.split(".")[-1] for name in expected if name.startswith("optimizer.")}
    assert kinds == {"exp_avg", "exp_avg_sq", "step"}
    for refused, found in on_ranks(loading(run), ranks=ranks):
        assert not refused
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


def test_one_process_opens_the_model_without_a_process_group(
    saved: tuple[Path, dict[str, Tensor]],
) -> None:
    run, expected = saved
    model, tokenizer = open_model(run)
    assert tokenizer is None
    assert not model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[f"model.{name}"]), name


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_engine_rank_reads_its_part_of_each_matrix(
    saved: tuple[Path, dict[str, Tensor]], ranks: int
) -> None:
    run, expected = saved
    config = find(run).index().meta.model
    for place in (TensorParallelRank(rank, ranks) for rank in range(ranks)):
        model, _ = open_model(run, place=place)
        for name, tensor in model.state_dict().items():
            part = expected[f"model.{name}"]
            if (found := slice_of(name, config, place)) is not None:
                part = part.narrow(found[0], found[1].start, len(found[1]))
            assert torch.equal(tensor, part), name


def test_a_checkpoint_says_what_it_is(saved: tuple[Path, dict[str, Tensor]]) -> None:
    assert find(saved[0]).index().meta == meta_of(3)


def test_no_file_of_a_checkpoint_is_a_pickle(saved: tuple[Path, dict[str, Tensor]]) -> None:
    files = sorted(folder_of(saved[0], 3).iterdir())
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        with path.open("rb") as file, pytest.raises((pickle.UnpicklingError, ValueError, EOFError, KeyError)):
            pickle.load(file)


def shards_of(run: Path) -> list[Path]:
    return sorted(folder_of(run, 3).glob("*.safetensors"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def garble_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8:40] = b"\xff" * 32
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, garble_header, empty, Path.unlink])
@pytest.mark.parametrize("which", [0, -1], ids=["first file", "last file"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_or_missing_file_is_refused_with_the_checkpoints_name(
    copy: Path, damage: Callable[[Path], None], which: int, ranks: int
) -> None:
    damage(shards_of(copy)[which])
    for refused, _ in on_ranks(loading(copy), ranks=ranks):
        assert f"Checkpoint {folder_of(copy, 3)} is damaged: " in refused
        assert "remove that checkpoint to use the one before" in refused


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_damaged_checkpoint_is_not_opened_as_a_model(copy: Path, damage: Callable[[Path], None]) -> None:
    damage(shards_of(copy)[0])
    with pytest.raises(CheckpointError, match=r"Checkpoint .*step-00000003 is damaged"):
        open_model(copy)


@pytest.mark.parametrize("content", ["", "{", '{"step": 3}', '{"stepp": 3}'])
def test_a_damaged_description_is_refused_with_its_path(copy: Path, content: str) -> None:
    (folder_of(copy, 3) / "checkpoint.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"step-00000003/checkpoint\.json is damaged: "):
        find(copy).index()


def test_a_run_without_a_complete_checkpoint_has_none(copy: Path, tmp_path: Path) -> None:
    (folder_of(copy, 3) / "checkpoint.json").unlink()
    (copy / "config.json").write_text('{"run": {}, "model": {}}')  # the recipe
    assert saved_of(copy) == []
    with pytest.raises(CheckpointError, match=r"run has no complete checkpoint\. Give the folder of a run"):
        find(copy)
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        find(tmp_path / "nowhere")


def test_only_the_newest_checkpoints_are_kept_and_leftovers_of_a_kill_are_cleared(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for leftover in (".step-00000002.tmp", ".step-00000009.tmp"):
        (root / leftover).mkdir(parents=True)
        (root / leftover / "half.safetensors").write_bytes(b"half")
    on_ranks(save_steps(tmp_path, 8, 9, 10, 100_000_000, keep=2), ranks=2)
    assert sorted(path.name for path in root.iterdir()) == ["step-00000010", "step-100000000"]
    assert str(find(tmp_path)) == str(root / "step-100000000")


def test_a_step_saved_again_replaces_its_checkpoint(copy: Path) -> None:
    (folder_of(copy, 3) / "stale").write_text("")
    on_ranks(save_steps(copy, 3), ranks=1)
    assert not (folder_of(copy, 3) / "stale").exists()
    assert [path.name for path in (copy / "checkpoints").iterdir()] == ["step-00000003"]


def test_a_folder_that_cannot_be_written_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where a folder should be")

    def work(world: World) -> str:
        tensors = sharded_tensors(world, seed=5, stepped=False)
        saver = Saver(place_in(tmp_path, ""), RetentionPolicy())
        with pytest.raises(CheckpointError) as refusal, saver:
            saver.save(tensors, meta_of(3))
        return str(refusal.value)

    for message in on_ranks(work, ranks=2):
        assert f"Checkpoint {folder_of(tmp_path, 3)} could not be written: " in message
        assert "it resumes from the start" in message


def test_lists_of_tensors_are_exchanged_once_per_layout_and_not_on_the_training_thread_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(world: World) -> list[int]:
        """Return after each save how often the training thread has exchanged something for it."""
        exchange, calls, after = saver_module.gather_values, [], []

        def counted(*arguments: Any) -> list[Any]:
            calls.append(threading.current_thread() is threading.main_thread())
            return exchange(*arguments)

        monkeypatch.setattr(saver_module, "gather_values", counted)
        tensors = sharded_tensors(world, seed=5, stepped=True)
        fewer = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
        with Saver(place_in(tmp_path, ""), RetentionPolicy(newest=9)) as saver:
            for step, (held, layout) in enumerate(
                [(tensors, 0), (tensors, 0), (fewer, 1), (tensors, 0), (fewer, 1)], start=1
            ):
                saver.save(held, meta_of(step), layout=layout)
                after.append(sum(calls))
        return after

    assert on_ranks(work, ranks=2) == [[1, 1, 2, 2, 2]] * 2
    sizes = [len(saved.index().tensors) for saved in saved_of(tmp_path)]
    assert len(sizes) == 5
    assert sizes[0] == sizes[1] == sizes[3] > sizes[2] == sizes[4]


def refusal_of(run: Path, saves: list[tuple[dict[str, torch.Tensor], int]]) -> str:
    """Save tensors in layouts, one after another; return the error."""

    def save() -> None:
        with Saver(place_in(run, ""), RetentionPolicy()) as saver:
            for step, (tensors, layout) in enumerate(saves, start=1):
                saver.save(tensors, meta_of(step), layout=layout)

    with pytest.raises(CheckpointError) as refusal:
        save()
    return str(refusal.value)


def test_other_tensors_in_a_layout_already_shared_out_are_refused(tmp_path: Path) -> None:
    def work(world: World) -> str:
        tensors = sharded_tensors(world, seed=5, stepped=True)
        return refusal_of(tmp_path, [(tensors, 0), (dict([*tensors.items()][1:]), 0)])

    for said in on_ranks(work, ranks=2):
        assert "Rank 0 holds other tensors than at an earlier save of the same layout" in said
    assert [saved.name for saved in saved_of(tmp_path)] == ["step-00000001"]


@pytest.mark.parametrize("known", [True, False], ids=["a known layout", "a new layout"])
@pytest.mark.parametrize("other", [0, 1])
def test_a_layout_that_changes_on_one_rank_only_is_refused_on_every_rank(
    tmp_path: Path, other: int, known: bool
) -> None:
    def work(world: World) -> str:
        layouts = [*range(1 + known), int(world.ranks.rank == other)]
        tensors = sharded_tensors(world, seed=5, stepped=True)
        return refusal_of(tmp_path, [(tensors, layout) for layout in layouts])

    for said in on_ranks(work, ranks=2):
        assert f"Rank 1 saves another layout than rank 0: {other}, not {1 - other}" in said


@pytest.mark.parametrize("other", [0, 1])
def test_tensors_that_change_on_one_rank_only_are_refused_on_every_rank(tmp_path: Path, other: int) -> None:
    def work(world: World) -> str:
        tensors = sharded_tensors(world, seed=5, stepped=True)
        others = dict([*tensors.items()][world.ranks.rank == other :])
        return refusal_of(tmp_path, [(tensors, 0), (others, 0)])

    for said in on_ranks(work, ranks=2):
        assert f"Rank {other} holds other tensors than at an earlier save of the same layout" in said
    assert [saved.name for saved in saved_of(tmp_path)] == ["step-00000001"]
