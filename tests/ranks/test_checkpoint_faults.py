"""What goes wrong around a save, and what is left: the newest sound checkpoint, and why it is that one."""

import errno
import logging
import mmap
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed as dist
from tests.families import small_llama

from penstock.checkpoint.find import SavedCheckpoint, find, saved_of
from penstock.checkpoint.layout import Meta
from penstock.checkpoint.load import load_into
from penstock.checkpoint.local_storage import LocalPlace
from penstock.checkpoint.resume import resume
from penstock.checkpoint.saver import RetentionPolicy, Saver
from penstock.checkpoint.staging import StagingBuffer
from penstock.checkpoint.storage import place_in
from penstock.core.errors import CheckpointDamaged, CheckpointError
from penstock.devices import accelerator
from penstock.parallel.mesh import World
from penstock.testing.ranks import on_ranks

MODEL = small_llama()
SIZE = 100_000  # enough to be shared out over two ranks


def meta_of(step: int) -> Meta:
    return Meta(step=step, tokens=1, model=MODEL, loader={}, seed=0, world_size=2)


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((SIZE,), float(step))}


def save_steps(run: Path, *steps: int) -> None:
    def work(_: World) -> None:
        with Saver(place_in(run, ""), RetentionPolicy(newest=9)) as saver:
            for step in steps:
                saver.save(tensors_of(step), meta_of(step))

    on_ranks(work, ranks=2)


def resumed(run: Path) -> list[tuple[str, float, str]]:
    """Resume on two ranks; return by rank what from, the value loaded, and what was refused."""

    def work(_: World) -> tuple[str, float, str]:
        tensors = tensors_of(0)
        try:
            saved = resume(saved_of(run), lambda saved: load_into(saved, tensors))
        except CheckpointError as error:
            return "", tensors["w"][0].item(), f"{type(error).__name__}: {error}"
        return saved.name if saved else "", tensors["w"][-1].item(), ""

    return on_ranks(work, ranks=2)


def file_of(run: Path, step: int, rank: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}" / f"rank-{rank:05d}.safetensors"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1000] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_resumes_from_the_newest_sound_checkpoint_and_sets_damaged_ones_aside(
    tmp_path: Path, damage, rank: int
) -> None:
    save_steps(tmp_path, 1, 2, 3)
    damage(file_of(tmp_path, 3, rank))
    index = tmp_path / "checkpoints" / "step-00000002" / "checkpoint.json"
    index.write_text(index.read_text().replace('"step": 2', '"step": 4'))
    assert resumed(tmp_path) == [("step-00000001", 1.0, "")] * 2
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["aside-step-00000002", "aside-step-00000003", "step-00000001"]
    save_steps(tmp_path, 2)
    assert resumed(tmp_path) == [("step-00000002", 2.0, "")] * 2


def test_what_is_wrong_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_steps(tmp_path, 1, 2)
    flip(file_of(tmp_path, 2, 1))

    def work(_: World) -> None:
        logging.basicConfig(format="%(message)s", force=True)
        resume(saved_of(tmp_path), lambda saved: load_into(saved, tensors_of(0)))

    on_ranks(work, ranks=2)
    said = capfd.readouterr().err
    assert said.count("step-00000002 is damaged: bytes") == 1
    assert said.count("of rank-00001.safetensors were altered. Restore it, or remove that checkpoint") == 1
    assert f"Resuming from {tmp_path}/checkpoints/step-00000001 instead; set aside: step-00000002" in said


def test_a_run_with_no_sound_checkpoint_does_not_start_over_in_silence(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        flip(file_of(tmp_path, step, 0))
    for name, _, refused in resumed(tmp_path):
        assert not name
        assert refused.startswith("CheckpointDamaged: ")
    assert [saved.name for saved in saved_of(tmp_path)] == ["step-00000001", "step-00000002"], (
        "nothing is moved"
    )


def test_a_checkpoint_of_something_else_is_refused_and_none_before_it_is_tried(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)

    def work(_: World) -> str:
        with pytest.raises(CheckpointError, match=r"step-00000002 has no momentum\. Resume with") as refused:
            resume(saved_of(tmp_path), lambda saved: load_into(saved, {"momentum": torch.zeros(1)}))
        return type(refused.value).__name__

    assert on_ranks(work, ranks=2) == ["CheckpointError"] * 2
    assert len(saved_of(tmp_path)) == 2


class Gated(LocalPlace):
    """A place that writes when it is let."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reached, self.opened = Event(), Event()

    def write(self, name: str, file: str, parts: Sequence[memoryview]) -> None:
        self.reached.set()
        assert self.opened.wait(60)
        super().write(name, file, parts)


def test_training_goes_on_while_a_save_is_written(tmp_path: Path) -> None:
    def work(world: World) -> float:
        place = Gated(tmp_path / "checkpoints")
        with Saver(place, RetentionPolicy()) as saver:
            saver.save(tensors_of(1), meta_of(1))
            assert place.reached.wait(60)
            (total,) = world.sum(1.0)  # a step's collective
            assert saved_of(tmp_path) == [], "what is half-written is not there"
            assert not saver.is_idle()
            place.opened.set()
            saver.finish()
            assert saver.is_idle()
            assert [saved.name for saved in saved_of(tmp_path)] == ["step-00000001"]
        times = saver.record()
        assert 0 < times["checkpoint_share"] <= 1
        assert saver.record()["checkpoint_s"] == 0, "told once"
        return total

    assert on_ranks(work, ranks=2) == [2.0, 2.0]


class Failing(LocalPlace):
    """A disk of rank 1 that is full for some saves."""

    def __init__(self, folder: Path, full_at: set[str]) -> None:
        super().__init__(folder)
        self.full_at = full_at

    def write(self, name: str, file: str, parts: Sequence[memoryview]) -> None:
        if name in self.full_at and dist.get_rank() == 1:
            super().write(name, file, [parts[0][:10]])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(name, file, parts)


def failing(run: Path, full_at: set[int], steps: int) -> list[str]:
    """Save steps on two ranks; return what ended it, by rank."""

    def work(_: World) -> str:
        place = Failing(run / "checkpoints", {f"step-{step:08d}" for step in full_at})
        try:
            with Saver(place, RetentionPolicy(newest=9, max_failures=3)) as saver:
                for step in range(1, steps + 1):
                    saver.save(tensors_of(step), meta_of(step))
        except CheckpointError as error:
            return str(error)
        return ""

    return on_ranks(work, ranks=2)


def test_a_full_disk_does_not_end_a_run_that_can_save_later(tmp_path: Path) -> None:
    assert failing(tmp_path, {2, 3}, 4) == ["", ""]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000001",
        "step-00000004",
    ]


@pytest.mark.parametrize(("full_at", "steps"), [({2, 3, 4}, 9), ({2}, 2)], ids=["three in a row", "the last"])
def test_too_many_failed_saves_or_a_failed_last_one_end_the_run_on_every_rank(
    tmp_path: Path, full_at: set[int], steps: int
) -> None:
    first, second = failing(tmp_path, full_at, steps)
    assert first == second
    assert f"step-{max(full_at):08d} could not be written: No space left on device. Free space or" in first
    assert "it resumes from step-00000001" in first
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"], (
        "no half is left"
    )


def test_a_host_that_refuses_memory_fails_saves_on_every_rank_and_not_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    def work(_: World) -> list[str]:
        found = []
        try:
            with Saver(place_in(tmp_path, ""), RetentionPolicy(max_failures=2)) as saver:
                if dist.get_rank() == 1:
                    monkeypatch.setattr(mmap, "mmap", refused)
                with monkeypatch.context() as patched:  # CPUs need no preparation
                    patched.setattr(accelerator, "is_accelerator", lambda device: device.type == "cpu")
                    patched.setattr(StagingBuffer, "_lock", lambda *_: None)
                    saver.prepare(tensors_of(0))
                for step in (1, 2, 3):
                    saver.save(tensors_of(step), meta_of(step))
                    found.append("went on")
        except CheckpointError as error:
            found.append(str(error))
        return found

    first, second = on_ranks(work, ranks=2)
    assert first == second
    assert first[:2] == ["went on"] * 2, "the first failure is a warning"
    assert "step-00000002 could not be written: The host refuses memory" in first[2]
    assert "Cannot allocate memory" in first[2]
    assert saved_of(tmp_path) == []


class Deadly(LocalPlace):
    """A place at which rank 1 is killed in the middle of a file."""

    def write(self, name: str, file: str, parts: Sequence[memoryview]) -> None:
        super().write(name, file, parts[:1])
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(name, file, parts)


def test_a_rank_that_dies_in_the_middle_of_a_save_leaves_the_one_before(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)

    def work(_: World) -> None:
        with Saver(Deadly(tmp_path / "checkpoints"), RetentionPolicy(newest=1)) as saver:
            saver.save(tensors_of(2), meta_of(2))

    with pytest.raises(AssertionError, match="SIGKILL"):
        on_ranks(work, ranks=2)
    assert (tmp_path / "checkpoints" / ".step-00000002.tmp").is_dir()
    assert find(tmp_path).name == "step-00000001"
    assert resumed(tmp_path) == [("step-00000001", 1.0, "")] * 2
    save_steps(tmp_path, 3)
    assert [str(saved)[-1] for saved in saved_of(tmp_path)] == ["1", "3"]
    assert not list((tmp_path / "checkpoints").glob(".*")), "what a killed writer left is gone"


def test_a_damaged_checkpoint_is_not_taken_for_whole_by_one_rank_alone(tmp_path: Path) -> None:
    """Rank 1 reads nothing of what is damaged, and hears of it all the same."""
    save_steps(tmp_path, 1)
    flip(file_of(tmp_path, 1, 0))

    def work(world: World) -> str:
        half = {"w": torch.zeros(SIZE)} if world.is_first else {}
        with pytest.raises(CheckpointDamaged) as refused:
            resume(saved_of(tmp_path), lambda saved: load_into(saved, half))
        return str(refused.value)

    first, second = on_ranks(work, ranks=2)
    assert first == second
    assert "rank-00000.safetensors were altered" in first


def test_a_checkpoint_removed_while_it_is_read_is_refused_in_words(tmp_path: Path) -> None:
    saved = SavedCheckpoint(LocalPlace(tmp_path), "step-00000001")
    with pytest.raises(CheckpointError, match="cannot be read: No such file or directory"):
        load_into(saved, {})
