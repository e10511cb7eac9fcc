"""A file beside a shard that a store fails to give is an error that names it: it may be there."""

import re
import shutil
from pathlib import Path

import pytest

from penstock.core.errors import CorpusError
from penstock.data.formats import FORMATS
from penstock.storage.base import Blob, LocalStorage, probe

DATA = Path(__file__).parent.parent.parent / "data"


class Failing(LocalStorage):
    """A folder of which some files cannot be had for now."""

    def __init__(self, folder: Path, *, ending: str) -> None:
        super().__init__(folder)
        self._ending = ending

    def open(self, name: str) -> Blob:
        if name.endswith(self._ending):
            raise CorpusError(f"{name} cannot be read after 9 attempts: the server is down")
        return super().open(name)


@pytest.mark.parametrize(
    ("format_", "folder", "shard", "companion", "options"),
    [
        ("datatrove", "datatrove/uint16", "00000_shuffled.ds", ".metadata", {}),
        ("olmo", "olmo/metadata", "part-0-00000.npy", ".csv.gz", {"dtype": "uint16", "eos_id": "0"}),
        ("mds", "mds/zstd", "shard.00000.mds.zstd", "index.json", {"column": "tokens"}),
    ],
)
def test_a_companion_that_cannot_be_had_is_not_taken_for_absent(
    format_: str, folder: str, shard: str, companion: str, options: dict[str, str], tmp_path: Path
) -> None:
    here = Path(shutil.copytree(DATA / folder, tmp_path / "here"))
    FORMATS[format_].open_shard(LocalStorage(here), shard, options)
    with pytest.raises(CorpusError, match=f"{re.escape(companion)} cannot be read"):
        FORMATS[format_].open_shard(Failing(here, ending=companion), shard, options)


def test_what_a_shard_is_known_by_is_not_made_without_a_companion_that_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "a.ds").write_bytes(b"tokens")
    alone = probe(LocalStorage(tmp_path), "a.ds", ["a.ds.metadata"])
    (tmp_path / "a.ds.metadata").write_bytes(b"2")
    assert probe(LocalStorage(tmp_path), "a.ds", ["a.ds.metadata"]) != alone
    with pytest.raises(CorpusError, match=r"a\.ds\.metadata cannot be read"):
        probe(Failing(tmp_path, ending=".metadata"), "a.ds", ["a.ds.metadata"])
