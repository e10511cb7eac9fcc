import gc
from pathlib import Path

import numpy as np
import pytest

from penstock.storage.mapped import map_file


def test_a_map_outlives_its_file_and_its_first_array_and_keeps_no_descriptor(tmp_path):
    path = tmp_path / "bytes"
    content = np.arange(10_007, dtype=np.uint16)
    path.write_bytes(content.tobytes())
    before = len(list(Path("/proc/self/fd").iterdir()))
    part = map_file(path)[2:2002].view(np.uint16)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    path.unlink()
    gc.collect()
    assert (part == content[1:1001]).all()
    with pytest.raises(ValueError, match="read-only"):
        part[0] = 1


def test_memory_is_given_back_with_the_last_array(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(b"x" * 9000)
    held = map_file(path)[5:]
    assert str(path) in Path("/proc/self/maps").read_text()
    del held
    assert str(path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("content", [None, b""])
def test_a_file_that_is_missing_or_empty_is_an_error_of_the_system(content, tmp_path):
    path = tmp_path / "bytes"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OSError, match=r"No such file|Invalid argument"):
        map_file(path)
