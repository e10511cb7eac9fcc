"""The index of what ranks wrote: the whole of every tensor once, or none."""

import pytest
from tests.families import small_llama

from penstock.checkpoint.layout import FileEntry, Meta, TensorEntry
from penstock.checkpoint.saver import Written, index_of
from penstock.core.errors import CheckpointError

META = Meta(step=3, tokens=1, model=small_llama(), loader={}, seed=0, world_size=2)


def written(rank, num_bytes, **shapes):
    tensors = {name: TensorEntry(dtype="F32", shape=shape) for name, shape in shapes.items()}
    file = FileEntry(num_bytes=100 + num_bytes, header_bytes=100, header_crc32=0)
    return Written(f"rank-{rank:05d}.safetensors", file, tensors)


def test_tensors_of_all_ranks_are_listed_by_name():
    index = index_of(META, [written(0, 24, b=(4, 3)), written(1, 32, a=(2,))])
    assert {name: entry.shape for name, entry in index.tensors.items()} == {"a": (2,), "b": (4, 3)}
    assert list(index.tensors) == ["a", "b"]
    assert list(index.files) == ["rank-00000.safetensors", "rank-00001.safetensors"]


@pytest.mark.parametrize("num_bytes", [20, 28])
def test_what_is_not_all_of_a_tensor_or_more_is_refused(num_bytes):
    said = rf"wrote {24 + num_bytes} bytes of tensors that have 48\. Report this as a bug"
    with pytest.raises(CheckpointError, match=said):
        index_of(META, [written(0, 24, b=(4, 3)), written(1, num_bytes)])
