"""The files of a checkpoint: readable by others, and no altered bit of them is believed."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tests.families import small_llama

from penstock.checkpoint.find import SavedCheckpoint, find, saved_in, to_remove
from penstock.checkpoint.layout import CheckpointIndex, FileEntry, Meta, TensorEntry, decode, encode, in_order
from penstock.checkpoint.local_storage import LocalPlace
from penstock.checkpoint.reader import ShardReader, TensorRead, faults
from penstock.checkpoint.shard_file import BLOCK_BYTES, TensorPart, header_of, not_finite
from penstock.checkpoint.tensors import DTYPES
from penstock.core.boxes import Box
from penstock.core.errors import CheckpointDamaged, CheckpointError

MODEL = small_llama()
ROWS = BLOCK_BYTES // 4 // 8  # of 8 float32: a third of what follows is one block
BIG = np.arange(3 * ROWS * 8, dtype=np.float32).reshape(3 * ROWS, 8)
SMALL = np.arange(5, dtype=np.int16)


def write(place: LocalPlace, step: int) -> SavedCheckpoint:
    """A checkpoint of one file: the rows of `big` from 1 on, and `small`; its last block is short."""
    parts = [
        TensorPart("big", (3 * ROWS + 1, 8), Box((1, 0), BIG.shape), "F32", 4),
        TensorPart("small", SMALL.shape, Box((0,), SMALL.shape), "I16", 2),
    ]
    data = memoryview(BIG.tobytes() + SMALL.tobytes())
    header = header_of(parts, data)
    name = f"step-{step:08d}"
    place.write(name, "rank-00000.safetensors", [memoryview(header), data])
    entry = FileEntry(
        num_bytes=len(header) + len(data), header_bytes=len(header), header_crc32=zlib.crc32(header)
    )
    meta = Meta(step=step, tokens=9, model=MODEL, loader={"v": 1}, seed=0, world_size=1)
    tensors = {
        "big": TensorEntry(dtype="F32", shape=(3 * ROWS, 8)),
        "small": TensorEntry(dtype="I16", shape=SMALL.shape),
    }
    place.commit(
        name, encode(CheckpointIndex(meta=meta, tensors=tensors, files={"rank-00000.safetensors": entry}))
    )
    return SavedCheckpoint(place, name)


@pytest.fixture
def saved(tmp_path: Path) -> SavedCheckpoint:
    return write(LocalPlace(tmp_path), 3)


def path_of(saved: SavedCheckpoint) -> Path:
    return Path(str(saved)) / "rank-00000.safetensors"


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_any_reader_of_safetensors_reads_a_file(saved: SavedCheckpoint) -> None:
    found = load_file(path_of(saved))
    assert found.keys() == {"big@1,0", "small"}
    assert (found["big@1,0"] == BIG).all()
    assert (found["small"] == SMALL).all()


def test_a_sound_checkpoint_has_no_faults(saved: SavedCheckpoint) -> None:
    told: list[tuple[int, int]] = []
    assert faults(saved, progress=lambda done, total: told.append((done, total))) == []
    assert told[-1][0] == BIG.nbytes + SMALL.nbytes


@pytest.mark.parametrize("at", [4, 60, 200, -1, -20, -2 * BLOCK_BYTES, -BIG.nbytes])
def test_one_flipped_bit_anywhere_is_found_and_its_place_named(saved: SavedCheckpoint, at: int) -> None:
    flip(path_of(saved), at)
    (fault,) = faults(saved)
    assert f"Checkpoint {saved} is damaged: " in fault
    assert "of rank-00000.safetensors were altered" in fault


def test_a_reader_of_other_rows_does_not_stumble_over_a_flipped_bit(saved: SavedCheckpoint) -> None:
    flip(path_of(saved), -BIG.nbytes)  # in the first block
    got: list[bytes] = []
    index = saved.index()
    reader = ShardReader(saved, "rank-00000.safetensors", index.files["rank-00000.safetensors"])
    reader.fetch([TensorRead(BIG.nbytes, BIG.nbytes + SMALL.nbytes, lambda view: got.append(bytes(view)))])
    assert got == [SMALL.tobytes()]
    with pytest.raises(CheckpointDamaged, match="were altered"):
        reader.fetch([TensorRead(0, 4, lambda _: None)])


def test_what_is_wanted_in_any_order_comes_once_and_right(saved: SavedCheckpoint) -> None:
    index = saved.index()
    reader = ShardReader(saved, "rank-00000.safetensors", index.files["rank-00000.safetensors"])
    content = BIG.tobytes() + SMALL.tobytes()
    runs = [(5, 9), (BLOCK_BYTES - 3, BLOCK_BYTES + 3), (len(content) - 1, len(content)), (0, len(content))]
    got: dict[tuple[int, int], bytes] = {}
    reader.fetch(
        [
            TensorRead(start, stop, lambda view, run=(start, stop): got.update({run: bytes(view)}))  # type: ignore[misc]
            for start, stop in runs
        ]
    )
    assert got == {(start, stop): content[start:stop] for start, stop in runs}


def test_missing_and_truncated_files_are_named(saved: SavedCheckpoint) -> None:
    path = path_of(saved)
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    assert f"is truncated: {len(content) - 100:,} of {len(content):,} bytes" in faults(saved)[0]
    path.write_bytes(content + b"x")
    assert "is longer than it was written" in faults(saved)[0]
    path.unlink()
    assert "rank-00000.safetensors is missing (No such file or directory)" in faults(saved)[0]


def test_any_altered_digit_of_the_index_is_found(saved: SavedCheckpoint) -> None:
    path = Path(str(saved)) / "checkpoint.json"
    text = path.read_text()
    path.write_text(text.replace('"tokens": 9', '"tokens": 8'))
    with pytest.raises(CheckpointDamaged, match=r"its checksum is wrong\. Restore it, or remove"):
        saved.index()
    path.write_text(json.dumps(json.loads(text)))  # laid out in another way
    assert saved.index().meta.tokens == 9


def test_a_checkpoint_of_an_earlier_layout_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        CheckpointError, match=r"has layout 1, and this Penstock reads layout 2\. Open it with"
    ):
        decode(b'{"version": 1, "step": 3}', path="x")
    assert not issubclass(CheckpointError, CheckpointDamaged), "else the one before would be taken instead"


def test_a_place_names_what_is_complete_and_what_is_left_over(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    for step in (7, 12, 100_000_000):
        write(place, step)
    place.write("step-00000020", "half", [memoryview(b"half")])
    (tmp_path / "notes").mkdir()
    assert [str(each)[-8:] for each in saved_in(place)] == ["00000007", "00000012", "00000000"]
    assert place.leftovers() == [".step-00000020.tmp"]
    place.remove(".step-00000020.tmp")
    assert place.leftovers() == []
    place.set_aside("step-00000012")
    assert in_order(place.names()) == ["step-00000007", "step-100000000"]
    assert (tmp_path / "aside-step-00000012" / "checkpoint.json").is_file()
    assert find(tmp_path / "step-00000007").name == "step-00000007"


@pytest.mark.parametrize(
    ("steps", "rule", "gone"),
    [
        ([1, 2, 3], {"keep": 1, "keep_every": 0}, [1, 2]),
        ([1, 2, 3], {"keep": 9, "keep_every": 0}, []),
        ([10, 20, 30, 40], {"keep": 1, "keep_every": 20}, [10, 30]),
        ([3, 9], {"keep": 1, "keep_every": 0}, []),
    ],
)
def test_the_one_just_written_always_stays(steps: list[int], rule: dict[str, int], gone: list[int]) -> None:
    assert to_remove(steps, written=3 if 9 in steps else steps[-1], **rule) == gone


FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_floating_point]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("at", [0, 1, 70_000, 99_999])
def test_a_number_that_is_not_finite_is_found_wherever_it_stands(dtype: str, at: int) -> None:
    kind = DTYPES[dtype]
    largest = torch.finfo(kind).max
    some = torch.tensor([0.0, -largest, largest, torch.finfo(kind).tiny], dtype=torch.float64)
    values = some.repeat(25_000).to(kind)
    size = kind.itemsize
    other = TensorPart("other", (3,), Box((0,), (3,)), "I64", 8)
    part = TensorPart("w", (len(values),), Box((0,), (len(values),)), dtype, size)
    ones = torch.full((3,), -1, dtype=torch.int64)  # all bits set, and no float

    def found(numbers: torch.Tensor) -> list[str]:
        content = ones.numpy().tobytes() + numbers.view(torch.uint8).numpy().tobytes()
        return not_finite([other, part], memoryview(content))

    assert found(values) == []
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = values.clone()
        broken[at] = bad
        assert found(broken) == ([] if broken.double().isfinite().all() else ["w"])
        if np.isnan(bad):
            assert found(broken) == ["w"]
