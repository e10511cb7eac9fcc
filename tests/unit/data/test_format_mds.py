"""MDS: what the library writes in its several encodings, checksums, splits, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import CorpusError, UsageError
from penstock.data import open_corpus
from penstock.data.formats.mds import find, open_shard
from penstock.storage.base import LocalStorage
from tests.format_examples import DATA, DOCUMENTS


def copied(folder: str, tmp_path: Path) -> Path:
    shutil.copytree(DATA / "mds" / folder, tmp_path / "c")
    return tmp_path / "c"


def shard_of(columns: dict[str, str], samples: list[bytes]) -> bytes:
    """Return a shard as the library lays it out."""
    config = json.dumps(
        {
            "column_names": list(columns),
            "column_encodings": list(columns.values()),
            "column_sizes": [8 if kind == "int" else None for kind in columns.values()],
        }
    ).encode()
    first = 4 + 4 * (len(samples) + 1) + len(config)
    bounds = np.cumsum([first, *map(len, samples)]).astype("<u4")
    return np.uint32(len(samples)).tobytes() + bounds.tobytes() + config + b"".join(samples)


def opened(tmp_path: Path, content: bytes, **options: str) -> list[list[int]]:
    (tmp_path / "shard.00000.mds").write_bytes(content)
    shard = open_shard(LocalStorage(tmp_path), "shard.00000.mds", options)
    ends = shard.document_ends(-1, shard.num_tokens)
    return [part.tolist() for part in np.split(shard.tokens[0 : shard.num_tokens], ends)[:-1]]


def test_empty_documents_are_kept(tmp_path: Path) -> None:
    corpus = open_corpus(f"mds:{copied('empties', tmp_path)},column=tokens")
    assert corpus.num_documents == len(DOCUMENTS) + 12
    assert corpus.tokens(0, corpus.num_tokens).tolist() == [token for doc in DOCUMENTS for token in doc]
    first = corpus.shard(0)
    assert first.document_ends(-1, 8).tolist() == np.cumsum([len(DOCUMENTS[0]), 0]).tolist()


def test_arrays_of_a_fixed_shape_are_documents_of_that_length(tmp_path: Path) -> None:
    corpus = open_corpus(copied("ndarray-fixed", tmp_path))
    expected = [doc[:8] for doc in DOCUMENTS if len(doc) >= 8]
    assert corpus.tokens(0, corpus.num_tokens).reshape(-1, 8).tolist() == expected


def test_tokens_of_two_bytes_are_read_in_place() -> None:
    folder = DATA / "mds" / "ndarray-uint16"
    shard = open_shard(LocalStorage(folder), "shard.00000.mds", {})
    tokens = shard.tokens[0:3]
    assert (tokens.base is not None, tokens.flags.owndata) == (True, False)


def test_a_shard_without_samples_has_no_tokens(tmp_path: Path) -> None:
    assert opened(tmp_path, shard_of({"tokens": "bytes"}, [])) == []


def test_bytes_of_another_type_are_found_out(tmp_path: Path) -> None:
    tokens = np.arange(1, 9, dtype="<u2").tobytes()
    content = shard_of({"tokens": "bytes"}, [np.uint32(len(tokens)).tobytes() + tokens])
    assert opened(tmp_path, content, dtype="uint16") == [list(range(1, 9))]
    with pytest.raises(CorpusError, match=r"shard\.00000\.mds has token \d+ in document 0"):
        opened(tmp_path, content)


def test_pickled_tokens_are_refused_and_never_read(tmp_path: Path) -> None:
    folder = copied("pkl", tmp_path)
    with pytest.raises(CorpusError, match=r"tokens.*pickles, which may run code"):
        open_corpus(f"mds:{folder},column=tokens")
    with pytest.raises(CorpusError, match=r"no column of integer arrays or bytes among tokens \(pkl\)"):
        open_corpus(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has 0 bytes"),
        (b"\xff\xff\xff\xff" + bytes(20), "the table of its 4,294,967,295 samples does not fit"),
        (shard_of({"t": "bytes"}, [bytes(4)])[:-1], "do not lie end to end"),
        (shard_of({"t": "bytes"}, [b"\x09\0\0\0abcd"]), "the columns of sample 0 do not fill it"),
        (shard_of({"t": "bytes"}, [b"ab"]), "too short for its columns"),
        (shard_of({"t": "ndarray:int32"}, [b"\x01\0\0\0\xff"]), "the array of sample 0 is cut off"),
        (shard_of({"t": "ndarray"}, [b"\x02\0\0\0\x22\x04"]), "not all of one integer type"),
        (shard_of({"t": "bytes"}, [b"\x03\0\0\0abc"]), "sample 0 has no whole number of int64"),
        (shard_of({"t": "bytes"}, []).replace(b"column_names", b"column_xxxxx"), "no description of columns"),
    ],
)
def test_a_damaged_shard_is_an_error_that_says_how(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(CorpusError, match=f"no sound MDS shard: .*{message}"):
        opened(tmp_path, content)


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    content = (DATA / "mds" / "columns" / "shard.00000.mds").read_bytes()
    for size in range(0, len(content), 37):
        with pytest.raises(CorpusError, match="no sound MDS shard"):
            opened(tmp_path, content[:size])


def test_the_checksums_of_the_index_are_held_against_the_file(tmp_path: Path) -> None:
    folder = copied("columns", tmp_path)
    shard = open_shard(LocalStorage(folder), "shard.00000.mds", {})
    assert list(shard.recheck()) == []
    path = folder / "shard.00000.mds"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    altered = open_shard(LocalStorage(folder), "shard.00000.mds", {})
    assert "is altered: its sha1 is not the one of its index" in altered.recheck()  # and xxh64, if installed


def test_a_compressed_shard_is_unpacked_once_and_kept(tmp_path: Path) -> None:
    folder = copied("zstd", tmp_path)
    name = "shard.00000.mds.zstd"
    first = open_shard(LocalStorage(folder), name, {})
    (kept,) = (folder / ".penstock").iterdir()
    made = kept.stat().st_mtime_ns
    again = open_shard(LocalStorage(folder), name, {})
    assert kept.stat().st_mtime_ns == made
    assert again.tokens[0:99].tolist() == first.tokens[0:99].tolist()


def test_an_altered_unpacked_copy_is_found(tmp_path: Path) -> None:
    folder = copied("zstd", tmp_path)
    shard = open_shard(LocalStorage(folder), "shard.00000.mds.zstd", {})
    assert list(shard.recheck()) == []
    (kept,) = (folder / ".penstock").iterdir()
    content = bytearray(kept.read_bytes())
    content[-1] ^= 1
    kept.write_bytes(content)
    problem, *_ = open_shard(LocalStorage(folder), "shard.00000.mds.zstd", {}).recheck()
    assert problem.startswith("was unpacked to ")
    assert problem.endswith("which is altered: its sha1 is not the one of its index")


def test_an_altered_compressed_shard_is_an_error(tmp_path: Path) -> None:
    folder = copied("zstd", tmp_path)
    path = folder / "shard.00000.mds.zstd"
    content = bytearray(path.read_bytes())
    content[60] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=r"shard\.00000\.mds\.zstd is altered: its sha1"):
        open_shard(LocalStorage(folder), path.name, {})
    assert not (folder / ".penstock").exists()


@pytest.mark.parametrize(
    ("size", "message"), [(10, "does not unpack to the 10 bytes"), (10**9, "does not unpack to the 1,000,")]
)
def test_a_compressed_shard_is_never_unpacked_beyond_the_size_in_its_index(
    tmp_path: Path, size: int, message: str
) -> None:
    folder = copied("zstd", tmp_path)
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0]["raw_data"]["bytes"] = size
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(CorpusError, match=message):
        open_shard(LocalStorage(folder), "shard.00000.mds.zstd", {})


def test_a_compressed_shard_without_its_index_is_an_error(tmp_path: Path) -> None:
    folder = copied("zstd", tmp_path)
    (folder / "index.json").unlink()
    with pytest.raises(CorpusError, match=r"compressed, and no index\.json says its unpacked size"):
        open_shard(LocalStorage(folder), "shard.00000.mds.zstd", {})
    (folder / "index.json").write_text("[1")
    with pytest.raises(CorpusError, match=r"index\.json is no index of MDS shards"):
        open_shard(LocalStorage(folder), "shard.00000.mds.zstd", {})


def test_an_unknown_compression_is_named(tmp_path: Path) -> None:
    (tmp_path / "shard.00000.mds.snappy").write_bytes(b"x")
    with pytest.raises(CorpusError, match="compressed as snappy, which is not read"):
        open_shard(LocalStorage(tmp_path), "shard.00000.mds.snappy", {})


def test_shards_are_found_by_their_index_and_their_split() -> None:
    assert find({"a.txt": 1}) == []
    assert find({"a.mds": 1}) == ["a.mds"], "opening the folder then says that its index is missing"
    assert find({"index.json": 1, "a.mds": 1, "a.mds.zstd": 1, "b.mds.gz": 1}) == ["a.mds", "b.mds.gz"]
    split = {"train/index.json": 1, "train/x.mds": 1, "val/index.json": 1, "val/x.mds": 1}
    assert find(split) == ["train/x.mds"]
    merged = {"index.json": 1, "1/x.mds": 1, "0/x.mds": 1}
    assert find(merged) == ["0/x.mds", "1/x.mds"]
    with pytest.raises(UsageError, match="2 splits"):
        find({name.replace("train", "dev"): size for name, size in split.items()})
