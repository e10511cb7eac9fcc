"""Files of other tools: which format, what is kept of them and where, and every way they can be wrong."""

import gzip
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import CorpusError, PenstockError, UsageError
from penstock.data import open_corpus
from penstock.data.corpus.corpus import Corpus
from penstock.data.corpus.external import foreign_manifest
from penstock.data.corpus.open import from_manifest
from penstock.data.formats import flat
from penstock.data.formats.flat_layouts import HEADER, MAGIC
from penstock.data.formats.index_cache import index_folders
from penstock.storage.base import LocalStorage
from penstock.testing.corpora import numbered_corpus
from tests.format_examples import EXAMPLES


def write_bin(folder: Path, tokens: list[int], name: str = "a.bin") -> Path:
    folder.mkdir(exist_ok=True)
    np.array(tokens, np.uint16).tofile(folder / name)
    return folder / name


def lengths(corpus: Corpus) -> list[int]:
    return corpus.fragments([(0, corpus.num_tokens)]).lengths.tolist()


def kept(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / ".penstock").iterdir()}


# which files


def test_a_path_may_name_one_shard_or_what_the_names_of_its_files_begin_with(tmp_path: Path) -> None:
    for name in ("a.bin", "a.b.bin", "ab.bin"):
        write_bin(tmp_path, [1, 2, 0], name)
    named = {"a.bin": ["a.bin"], "a": ["a.b.bin", "a.bin"], ".": ["a.b.bin", "a.bin", "ab.bin"]}
    for path, shards in named.items():
        corpus = open_corpus(f"nanogpt:{tmp_path / path},eos_id=0")
        assert [entry.name for entry in corpus.manifest.shards] == shards


def test_nanogpts_validation_files_are_no_part_of_a_folder_but_can_be_named(tmp_path: Path) -> None:
    for name in ("train.bin", "val.bin"):
        write_bin(tmp_path, [1, 2, 0], name)
    for path, shards in ((tmp_path, ["train.bin"]), (tmp_path / "val.bin", ["val.bin"])):
        corpus = open_corpus(f"nanogpt:{path},eos_id=0")
        assert [entry.name for entry in corpus.manifest.shards] == shards
    for name in ("test.bin", "other.bin"):
        write_bin(tmp_path / "unclear", [1, 2, 0], name)
    with pytest.raises(UsageError, match="It has 2 splits, and which is for training is not known"):
        open_corpus(f"nanogpt:{tmp_path / 'unclear'},eos_id=0")


def test_hidden_files_and_folders_are_passed_over(tmp_path: Path) -> None:
    write_bin(tmp_path, [1, 0])
    write_bin(tmp_path, [2, 0], ".b.bin")
    write_bin(tmp_path / ".c", [3, 0])
    assert open_corpus(f"nanogpt:{tmp_path},eos_id=0").num_tokens == 2


def test_a_file_is_told_by_its_name_without_a_format(tmp_path: Path) -> None:
    spec = next(example for example in EXAMPLES if example.folder == "megatron/uint16").copy(tmp_path)
    shard = spec.removeprefix("megatron:") + "/part-1"
    assert len(open_corpus(shard).manifest.shards) == 1
    assert open_corpus(f"{shard}.bin").manifest.format == "megatron"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            [],
            r"has no manifest\.json, and .* match no known format .*it is empty.*penstock data prepare",
        ),
        (["a.txt", "b.txt", "c.json"], r"seen: 2 \.txt, 1 \.json\).*FORMAT:PATH.*megatron, "),
        (["a.npy", "b.ds"], r"matches several formats: datatrove, olmo\. Name one, as in 'datatrove:"),
    ],
)
def test_files_that_tell_no_format_are_listed(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CorpusError, match=message):
        open_corpus(tmp_path)


def test_what_does_not_exist_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"nothing does not exist\. Make it with"):
        open_corpus(f"nanogpt:{tmp_path}/nothing,eos_id=0")
    write_bin(tmp_path, [1])
    with pytest.raises(CorpusError, match=r"has no files of format megatron \(seen: 1 \.bin\)"):
        open_corpus(f"megatron:{tmp_path}")


# what is kept


def test_what_was_found_is_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bin(tmp_path, [1, 0, 2, 2, 0])
    spec = f"nanogpt:{tmp_path},eos_id=0"
    first = open_corpus(spec)
    before = kept(tmp_path)
    assert sorted(name.rsplit(".", 1)[1] for name in before) == ["ends", "json"]
    monkeypatch.setattr(flat, "document_chunks", None)  # it is not looked at again
    again = open_corpus(spec)
    assert (again.manifest, lengths(again)) == (first.manifest, [2, 3])
    assert kept(tmp_path) == before


@pytest.mark.parametrize("change", ["size", "content", "another"])
def test_files_that_changed_are_indexed_anew(tmp_path: Path, change: str) -> None:
    write_bin(tmp_path, [1, 0, 2, 2, 0])
    write_bin(tmp_path, [5, 0], "b.bin")
    spec = f"nanogpt:{tmp_path},eos_id=0"
    before = open_corpus(spec).fingerprint
    if change == "size":
        write_bin(tmp_path, [1, 0, 2, 2, 2, 0])
    elif change == "content":
        write_bin(tmp_path, [1, 3, 2, 2, 0])
    else:
        write_bin(tmp_path, [9, 0], "c.bin")
    found = open_corpus(spec)
    expected = {"size": [2, 4, 2], "content": [5, 2], "another": [2, 3, 2, 2]}
    assert lengths(found) == expected[change]
    assert found.fingerprint != before


@pytest.mark.parametrize("options", ["eos_id=0", "eos_id=2,vocab_size=9"])
@pytest.mark.parametrize("place", [".", "b.bin"])
def test_a_file_that_went_is_refused_until_what_was_kept_is_deleted(
    tmp_path: Path, options: str, place: str
) -> None:
    write_bin(tmp_path, [1, 0, 2, 2, 0])
    write_bin(tmp_path, [5, 0], "b.bin")
    open_corpus(f"nanogpt:{tmp_path / place},eos_id=0")
    (tmp_path / "b.bin").unlink()
    with pytest.raises(CorpusError, match=r"/b\.bin is missing; it had 4 bytes when .* delete .*\.json"):
        open_corpus(f"nanogpt:{tmp_path},{options}")
    for kept_file in (tmp_path / ".penstock").glob("*.json"):
        kept_file.unlink()
    assert open_corpus(f"nanogpt:{tmp_path},{options}").num_tokens == 5


def test_a_file_that_was_not_named_may_go(tmp_path: Path) -> None:
    for name in ("a.bin", "b.bin"):
        write_bin(tmp_path, [1, 0], name)
    open_corpus(f"nanogpt:{tmp_path},eos_id=0")
    (tmp_path / "b.bin").unlink()
    assert open_corpus(f"nanogpt:{tmp_path / 'a.bin'},eos_id=0").num_tokens == 2


def test_some_of_the_numbered_files_can_be_named(tmp_path: Path) -> None:
    for number in range(2):
        write_bin(tmp_path, [1, 0], f"train_{number}.bin")
    assert open_corpus(f"nanogpt:{tmp_path / 'train_1'},eos_id=0").num_tokens == 2


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"\xff" * 200])
def test_damaged_files_of_the_index_are_made_again(tmp_path: Path, content: bytes) -> None:
    write_bin(tmp_path, [1, 0, 2, 2, 0])
    spec = f"nanogpt:{tmp_path},eos_id=0"
    open_corpus(spec)
    for name in (good := kept(tmp_path)):
        (tmp_path / ".penstock" / name).write_bytes(content)
    assert lengths(open_corpus(spec)) == [2, 3]
    assert kept(tmp_path) == good


def test_other_options_do_not_share_what_is_kept(tmp_path: Path) -> None:
    write_bin(tmp_path, [1, 0, 2, 2, 0])
    found = {
        option: lengths(open_corpus(f"nanogpt:{tmp_path},{option}"))
        for option in ("eos_id=0", "eos_id=2", "eos_id=none", "bos_id=0", "bos_id=1", "eos_id=70000")
    }
    assert found == {
        "eos_id=0": [2, 3],
        "eos_id=2": [3, 1, 1],
        "eos_id=none": [5],
        "bos_id=0": [1, 3, 1],
        "bos_id=1": [5],
        "eos_id=70000": [5],
    }


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("nanogpt/raw", "train_000000.bin-4da7af7cf88c89b4.ends"),
        ("nanogpt/header", "train_000000.bin-13eea0959889f98c.ends"),
        ("olmo/uint32", "part-0-00000.npy-af39f6b150f69067.ends"),
        ("olmo/metadata", "part-0-00000.npy-a0684d9aaa79dfa0.ends"),
        ("olmo/header", "part-0-00000.npy-f95fb4ec8984ee88.ends"),
    ],
)
def test_document_ends_that_earlier_versions_kept_are_found(tmp_path: Path, folder: str, name: str) -> None:
    spec = next(example for example in EXAMPLES if example.folder == folder).copy(tmp_path)
    assert name in kept(Path(open_corpus(spec).location))


def test_where_no_file_can_be_written_beside_the_data_the_users_cache_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    write_bin(folder, [1, 0, 2, 2, 0])
    (folder / ".penstock").touch()  # as a read-only folder does, it takes no file
    assert lengths(open_corpus(f"nanogpt:{folder},eos_id=0")) == [2, 3]
    beside, cached = index_folders(LocalStorage(folder))
    assert beside.is_file()
    assert sorted(path.suffix for path in cached.iterdir()) == [".ends", ".json"]


def test_processes_that_index_at_the_same_time_make_the_same(tmp_path: Path) -> None:
    write_bin(tmp_path, [1, 0, 2, 2, 0] * 50_000)
    spec = f"nanogpt:{tmp_path},eos_id=0"
    with ThreadPoolExecutor(8) as pool:  # each writes under a name of its own, as processes do
        found = list(pool.map(open_corpus, [spec] * 16))
    assert len({corpus.fingerprint for corpus in found}) == 1
    assert len(kept(tmp_path)) == 2, "no half-written file is left"


def test_documents_are_found_across_the_edges_of_what_is_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat, "_CHUNK", 4)
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 3, 101)
    write_bin(tmp_path, tokens.tolist())
    expected = np.diff(np.union1d(np.flatnonzero(tokens == 0) + 1, [0, 101])).tolist()
    assert lengths(open_corpus(f"nanogpt:{tmp_path},eos_id=0")) == expected
    expected = np.diff(np.union1d(np.flatnonzero(tokens == 0), [0, 101])).tolist()
    assert lengths(open_corpus(f"nanogpt:{tmp_path},bos_id=0")) == expected


def test_the_vocabulary_is_what_the_user_says_or_the_largest_id_or_the_types_limit(tmp_path: Path) -> None:
    write_bin(tmp_path / "a", [1, 77, 0])
    assert open_corpus(f"nanogpt:{tmp_path / 'a'},eos_id=0").manifest.vocab_size == 78
    assert open_corpus(f"nanogpt:{tmp_path / 'a'},eos_id=0,vocab_size=300").manifest.vocab_size == 300
    spec = next(example for example in EXAMPLES if example.folder == "megatron/uint16").copy(tmp_path)
    assert open_corpus(spec).manifest.vocab_size == 65_536


def test_progress_counts_the_bytes_of_the_shards(tmp_path: Path) -> None:
    write_bin(tmp_path, [1, 0])
    write_bin(tmp_path, [1, 1, 0], "b.bin")
    seen: list[tuple[int, int]] = []
    foreign_manifest(
        LocalStorage(tmp_path),
        {"a.bin": 4, "b.bin": 6},
        prefix="",
        format="nanogpt",
        options={"eos_id": "0"},
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(0, 10), (4, 10), (10, 10)]


# what is wrong with files


def megatron(
    folder: Path,
    tokens: list[int],
    *,
    sequences: list[int],
    marks: list[int],
    code: int = 8,
    dtype: str = "<u2",
    version: int = 1,
) -> str:
    np.array(tokens, dtype).tofile(folder / "a.bin")
    size = np.dtype(dtype).itemsize
    pointers = [size * sum(sequences[:n]) for n in range(len(sequences))]
    index = HEADER.pack(MAGIC, version, code, len(sequences), len(marks))
    index += np.array(sequences, "<i4").tobytes() + np.array(pointers + marks, "<i8").tobytes()
    (folder / "a.idx").write_bytes(index)
    return f"megatron:{folder}"


def test_megatrons_documents_may_have_many_sequences_or_none(tmp_path: Path) -> None:
    spec = megatron(tmp_path, [1, 2, 3, 4, 5, 6], sequences=[1, 0, 2, 3], marks=[0, 0, 3, 3, 4, 4])
    corpus = open_corpus(spec)
    assert lengths(corpus) == [3, 3], "empty documents have no fragments"
    assert corpus.manifest.num_documents == 5
    assert corpus.shard(0).document_ends(0, 6).tolist() == [3, 3, 6, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"marks": [0, 1]}, r"a\.idx has document marks that do not run from 0 to its 2 sequences"),
        ({"marks": []}, r"document marks that do not run from 0"),
        ({"marks": [0, 2, 1, 2]}, r"a\.idx has document marks that do not rise"),
        ({"sequences": [3, 4]}, r"a\.bin has 12 bytes, its index says 14\. .*truncated"),
        ({"code": 7}, r"a\.idx is of tokens stored as float32, which are no token ids"),
        ({"code": 99}, r"a\.idx is of tokens stored as type 99"),
        ({"version": 2}, r"a\.idx is no Megatron index of version 1"),
    ],
)
def test_a_megatron_index_that_lies_is_named(tmp_path: Path, changes: dict, message: str) -> None:
    arguments = {"sequences": [3, 3], "marks": [0, 1, 2], **changes}
    with pytest.raises(CorpusError, match=message):
        lengths(open_corpus(megatron(tmp_path, [1, 2, 3, 4, 5, 6], **arguments)))


@pytest.mark.parametrize(
    ("dtype", "code", "bad", "limit"),
    [("<i8", 5, -1, "4,294,967,295"), ("<i8", 5, 2**32, "4,294,967,295"), ("<i4", 4, -7, "2,147,483,647"),
     ("<i2", 3, -2, "32,767"), ("<u8", 10, 2**63, "4,294,967,295")],
)  # fmt: skip
def test_a_token_that_is_no_id_is_refused_where_it_is_read(
    tmp_path: Path, dtype: str, code: int, bad: int, limit: str
) -> None:
    spec = megatron(tmp_path, [1, 2, 3, bad], sequences=[4], marks=[0, 1], code=code, dtype=dtype)
    corpus = open_corpus(spec)
    assert corpus.tokens(0, 3).tolist() == [1, 2, 3]
    with pytest.raises(CorpusError, match=rf"a\.bin has token {bad} at position 3, .*from 0 to {limit}"):
        corpus.tokens(1, 4)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([2, 1, 3], r"a\.ds\.index has document ends that do not rise"),
        ([2, 5], r"a\.ds has 6 bytes, its index ends at token 5"),
        ([2**63], r"a\.ds has 6 bytes, its index ends at token -9,223"),
    ],
)
def test_a_datatrove_index_that_lies_is_named(tmp_path: Path, ends: list[int], message: str) -> None:
    np.array([1, 2, 3], np.uint16).tofile(tmp_path / "a.ds")
    np.array(ends, np.uint64).tofile(tmp_path / "a.ds.index")
    with pytest.raises(CorpusError, match=message):
        lengths(open_corpus(tmp_path))


def test_a_datatrove_file_without_its_index_is_named(tmp_path: Path) -> None:
    np.array([1, 2, 3], np.uint16).tofile(tmp_path / "a.ds")
    with pytest.raises(CorpusError, match=r"a\.ds\.index is missing"):
        open_corpus(tmp_path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0,2\n3,4\n", r"a\.csv\.gz lists a document of tokens 3 to 4 after token 2 of 4"),
        ("0,2\n2,9\n", r"lists a document of tokens 2 to 9 after token 2 of 4"),
        ("0,0\n0,4\n", r"lists a document of tokens 0 to 0"),
        ("0\n", r"a\.csv\.gz cannot be read as documents' starts and ends"),
        ("0,x\n", r"b'x' is no position"),
        ("0,4" + "4" * 10**6, r"is no position"),
    ],
)
def test_olmos_metadata_that_lies_is_named(tmp_path: Path, rows: str, message: str) -> None:
    np.array([1, 2, 3, 4], np.uint16).tofile(tmp_path / "a.npy")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(rows.encode()))
    with pytest.raises(CorpusError, match=message):
        open_corpus(f"olmo:{tmp_path},dtype=uint16")


def test_olmos_metadata_is_believed_where_a_document_lost_its_end_token(tmp_path: Path) -> None:
    np.array([1, 2, 3, 4, 0, 6], np.uint16).tofile(tmp_path / "a.npy")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"0,2,id,where\n2,5,id,where\n"))
    assert lengths(open_corpus(f"olmo:{tmp_path},dtype=uint16,eos_id=0")) == [2, 3, 1]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (
            np.zeros((2, 3), np.uint16),
            r"a\.npy has a \.npy header that is not one of a flat array of integers",
        ),
        (np.zeros(3, np.float32), r"not one of a flat array of integers"),
        (np.zeros(3, ">u2"), r"not one of a flat array of integers"),
    ],
)
def test_an_npy_file_of_anything_else_is_named(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(CorpusError, match=message):
        open_corpus(f"olmo:{tmp_path},eos_id=0")


def test_a_truncated_npy_file_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(100, np.uint16))
    os.truncate(tmp_path / "a.npy", 200)
    with pytest.raises(CorpusError, match=r"a\.npy does not hold the 100 tokens that its header says"):
        open_corpus(f"olmo:{tmp_path},eos_id=0")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ((20240520, 1, 9), r"a\.bin holds 3 tokens, its header says 9\. It is truncated"),
        ((20240520, 1, -1), r"its header says -1"),
        ((20240520, 4, 3), r"a\.bin has a header of version 4, which is not known"),
    ],
)
def test_a_header_that_lies_is_named(tmp_path: Path, head: tuple[int, int, int], message: str) -> None:
    content = struct.pack("<256i", *head, *[0] * 253) + np.ones(3, np.uint16).tobytes()
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        open_corpus(f"nanogpt:{tmp_path},bos_id=0")


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("nanogpt:{},eos_id=0,dtype=uint32", CorpusError, r"has 6 bytes of tokens, .*number of uint32"),
        ("nanogpt:{}", UsageError, r"a\.bin stores no document boundaries\. Add ',eos_id=N'.*',eos_id=none'"),
        ("nanogpt:{},eos_id=0,bos_id=0", UsageError, r"Give eos_id or bos_id, not both"),
        ("nanogpt:{},eos_id=-1", UsageError, r"eos_id must be a token id \(got '-1'\)"),
        ("nanogpt:{},bos_id=none", UsageError, r"bos_id must be a token id \(got 'none'\)"),
        ("nanogpt:{},eos_id=0,dtype=unit64", UsageError, r"\(got 'unit64'\)\. Did you mean 'uint64'"),
        ("nanogpt:{},eos_id=0,vocab_size=lots", UsageError, r"vocab_size must be a whole number up to"),
        ("olmo:{},eos_id=0", UsageError, r"b\.npy does not say the type of .*',dtype=uint16'"),
        ("olmo:{},dtype=uint16", UsageError, r"b\.npy stores no document boundaries"),
    ],
)  # fmt: skip
def test_an_option_that_is_missing_or_wrong_is_named(
    tmp_path: Path, spec: str, error: type[PenstockError], message: str
) -> None:
    write_bin(tmp_path, [1, 2, 3])
    write_bin(tmp_path, [1, 2, 3], "b.npy")
    with pytest.raises(error, match=message):
        open_corpus(spec.format(tmp_path))


@pytest.mark.parametrize("spec", ["nanogpt:{},eos_id=0", "olmo:{},dtype=uint16,eos_id=0", "datatrove:{}"])
def test_empty_files_are_shards_of_nothing_and_a_corpus_of_them_is_refused(tmp_path: Path, spec: str) -> None:
    for name in ("a.bin", "a.npy", "a.ds", "a.ds.index"):
        (tmp_path / name).touch()
    with pytest.raises(CorpusError, match="has no tokens in its 1 "):
        open_corpus(spec.format(tmp_path))


def test_an_empty_shard_among_others_is_passed_over(tmp_path: Path) -> None:
    write_bin(tmp_path, [1, 0])
    write_bin(tmp_path, [], "b.bin")
    write_bin(tmp_path, [2, 2, 0], "c.bin")
    assert lengths(open_corpus(f"nanogpt:{tmp_path},eos_id=0")) == [2, 3]


def test_a_manifest_that_says_another_type_is_refused_before_ids_are_cut_to_size(tmp_path: Path) -> None:
    spec = next(example for example in EXAMPLES if example.folder == "datatrove/uint32").copy(tmp_path)
    corpus = open_corpus(spec)
    object.__setattr__(corpus.manifest, "dtype", "uint16")
    lying = from_manifest(LocalStorage(Path(corpus.location)), corpus.manifest, tokenizer_path=None)
    with pytest.raises(CorpusError, match=r"holds uint32 tokens, its manifest says uint16"):
        lying.tokens(0, 1)


def test_the_manifest_of_a_corpus_is_not_its_name(tmp_path: Path) -> None:
    corpus = numbered_corpus(tmp_path / "c", [5, 6])
    with pytest.raises(CorpusError, match=r"is the manifest of a corpus. Name its folder: .*/c\."):
        open_corpus(corpus / "manifest.json")
