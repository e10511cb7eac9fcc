"""Describing and verifying corpora: exact lengths, and every kind of damage found."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import CorpusError
from penstock.core.files import checksum
from penstock.data.corpus.manifest import Manifest, ShardEntry, load_manifest, save_manifest
from penstock.data.formats.arrow import write_shard
from penstock.data.tools.describe import _EXACT, describe, measure
from penstock.data.tools.verify import verify
from penstock.text.tokenizer import Tokenizer, train_tokenizer
from tests.format_examples import EXAMPLES

DOCUMENTS = [["the cat", "a", "the dog sat on the mat " * 20], ["x" * 9, "second\tshard"], ["end"]]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three shards, six documents, a tokenizer."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    tokenizer = train_tokenizer(["the cat sat on the mat " * 9], vocab_size=280)
    tokenizer.save(folder / "tokenizer.json")
    shards = []
    for number, texts in enumerate(DOCUMENTS):
        shards.append(store(folder / f"shard-{number:05d}.arrow", [[*tokenizer.encode(t), 0] for t in texts]))
    write_manifest(folder, tuple(shards), tokenizer)
    return folder


def store(path: Path, lists: list[list[int]]) -> ShardEntry:
    offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    write_shard(path, np.array([t for tokens in lists for t in tokens], np.uint16), offsets)
    return ShardEntry(
        name=path.name,
        tokens=int(offsets[-1]),
        documents=len(lists),
        bytes=path.stat().st_size,
        checksum=checksum(path),
    )


def write_manifest(folder: Path, shards: tuple[ShardEntry, ...], tokenizer: Tokenizer) -> None:
    manifest = Manifest(
        format="arrow",
        dtype="uint16",
        vocab_size=tokenizer.vocab_size,
        eos_id=0,
        tokenizer=tokenizer.fingerprint,
        shards=shards,
    )
    save_manifest(folder, manifest)


def faults(folder: Path | str) -> list[tuple[str, str]]:
    return [(fault.file, fault.problem) for fault in verify(folder).faults]


def test_a_sound_corpus_has_no_faults_and_progress_ends_at_its_size(corpus: Path) -> None:
    seen: list[tuple[int, int]] = []
    assert verify(corpus, on_progress=lambda done, total: seen.append((done, total))).faults == ()
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] == sum(path.stat().st_size for path in corpus.glob("*.arrow"))


def flip(folder: Path) -> None:
    """Change one bit of the last token byte of shard 1."""
    path = folder / "shard-00001.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap(folder: Path) -> None:
    (folder / "shard-00000.arrow").rename(folder / "x")
    (folder / "shard-00002.arrow").rename(folder / "shard-00000.arrow")
    (folder / "x").rename(folder / "shard-00002.arrow")


DAMAGES: list[tuple[Callable[[Path], object], list[tuple[str, str]]]] = [
    (flip, [("shard-00001.arrow", "altered: its checksum is not the manifest's")]),
    (lambda f: (f / "shard-00001.arrow").unlink(), [("shard-00001.arrow", "missing")]),
    (
        lambda f: os.truncate(f / "shard-00000.arrow", 100),
        [
            ("shard-00000.arrow", "has 100 bytes"),
            ("shard-00000.arrow", "altered"),
            ("shard-00000.arrow", "cannot be opened"),
        ],
    ),
    (
        swap,
        [
            ("shard-00000.arrow", "holds the content of shard-00002.arrow"),
            ("shard-00002.arrow", "holds the content of shard-00000.arrow"),
        ],
    ),
    (lambda f: (f / "tokenizer.json").unlink(), [("tokenizer.json", "missing")]),
    (lambda f: (f / "tokenizer.json").write_text("{}"), [("tokenizer.json", "altered")]),
]


@pytest.mark.parametrize(
    ("damage", "expected"), DAMAGES, ids=["flip", "missing", "truncated", "swap", "no tokenizer", "tokenizer"]
)
def test_every_damage_is_found(
    corpus: Path, damage: Callable[[Path], object], expected: list[tuple[str, str]]
) -> None:
    damage(corpus)
    found = faults(corpus)
    for file, problem in expected:
        assert any(f == file and p.startswith(problem) for f, p in found), found
    assert {file for file, _ in found} == {file for file, _ in expected}


@pytest.mark.parametrize(
    ("lists", "problem"),
    [
        ([[5, 999, 0]], "token 1 is 999, outside the vocabulary"),
        ([[5, 0], [6]], "1 documents do not end with the end token 0"),
    ],
)
def test_contents_that_break_the_manifests_promises_are_found(
    corpus: Path, lists: list[list[int]], problem: str
) -> None:
    shards = (store(corpus / "shard-00000.arrow", lists),)
    write_manifest(corpus, shards, Tokenizer.load(corpus / "tokenizer.json"))
    assert [p for _, p in faults(corpus) if p.startswith(problem)]


def test_offsets_that_fall_are_found(corpus: Path) -> None:
    path = corpus / "shard-00000.arrow"
    write_shard(path, np.array([1, 2, 3, 4, 5, 0], np.uint16), np.array([0, 2, 5, 3, 6], np.int64))
    entry = ShardEntry(
        name=path.name, tokens=6, documents=4, bytes=path.stat().st_size, checksum=checksum(path)
    )
    write_manifest(corpus, (entry,), Tokenizer.load(corpus / "tokenizer.json"))
    (found,) = [problem for _, problem in faults(corpus) if problem.startswith("its document offsets")]
    assert "do not rise" in found


def test_a_corpus_of_another_tool_is_verified_without_checksums(tmp_path: Path) -> None:
    example = next(example for example in EXAMPLES if example.folder == "nanogpt/raw")
    spec = example.copy(tmp_path)
    assert verify(spec).faults == ()
    path = tmp_path / "example" / "train_000000.bin"
    tokens = np.fromfile(path, np.uint16)
    np.where(np.arange(len(tokens)) == 3, 0, tokens).astype(np.uint16).tofile(path)
    assert verify(spec).faults == (), "it is indexed anew"


def test_documents_that_are_not_those_of_the_index_are_found(tmp_path: Path) -> None:
    tokens = np.arange(1, 20_001, dtype=np.uint16)
    tokens.tofile(tmp_path / "a.bin")
    spec = f"nanogpt:{tmp_path},eos_id=0"
    assert verify(spec).faults == ()
    tokens[10_000] = 0  # where no probe looks
    tokens.tofile(tmp_path / "a.bin")
    assert faults(spec) == [("a.bin", "its documents are not those found when it was indexed")]


def test_token_ids_beyond_the_vocabulary_of_a_foreign_corpus_are_found(tmp_path: Path) -> None:
    np.array([5, 7, 300, 0], np.uint16).tofile(tmp_path / "a.bin")
    assert faults(f"nanogpt:{tmp_path},eos_id=0,vocab_size=300") == [
        ("a.bin", "token 2 is 300, outside the vocabulary of 300")
    ]


def test_wrong_counts_and_another_type_are_found(corpus: Path) -> None:
    manifest = load_manifest(corpus)
    first = replace(manifest.shards[0], tokens=1, documents=9)
    save_manifest(corpus, replace(manifest, shards=(first, *manifest.shards[1:]), dtype="uint32"))
    problems = [problem for file, problem in faults(corpus) if file == "shard-00000.arrow"]
    assert [p.split(", the")[0].split(" ", 2)[2] for p in problems] == ["tokens", "documents", "are uint16"]


def test_describe_counts_every_document_exactly(corpus: Path) -> None:
    found = describe(corpus)
    tokenizer = Tokenizer.load(corpus / "tokenizer.json")
    lengths = sorted(len(tokenizer.encode(text)) + 1 for texts in DOCUMENTS for text in texts)
    assert (found.lengths.min, found.lengths.max) == (lengths[0], lengths[-1])
    assert found.lengths.median == lengths[2]
    assert found.lengths.mean == pytest.approx(sum(lengths) / 6)
    assert sum(count for _, _, count in found.lengths.histogram) == 6


def test_describe_shows_the_beginnings_of_documents(corpus: Path) -> None:
    first, *others = describe(corpus, num_samples=3, sample_tokens=5).samples
    assert (first.position, first.text, first.whole) == (0, "the cat", True)
    assert not all(sample.whole for sample in others)


def test_empty_documents_are_counted_wherever_they_stand(corpus: Path) -> None:
    shards = (store(corpus / "shard-00000.arrow", [[], [], [7, 0], [], [8]]),)
    write_manifest(corpus, shards, Tokenizer.load(corpus / "tokenizer.json"))
    found = describe(corpus).lengths
    assert (found.min, found.median, found.max) == (0, 0, 2)
    assert found.histogram == ((0, 1, 3), (1, 2, 1), (2, 4, 1))


def test_lengths_beyond_the_counting_table_are_exact() -> None:
    huge = [_EXACT, _EXACT * 5, _EXACT * 5 + 1]
    found = measure([np.array([3, *huge])])
    assert (found.min, found.median, found.max) == (3, _EXACT, _EXACT * 5 + 1)
    assert found.histogram[-1] == (_EXACT * 4, _EXACT * 8, 2)
    assert measure([np.array(huge)]).min == _EXACT


@pytest.mark.parametrize("call", [describe, verify])
def test_a_folder_that_is_no_corpus_is_an_error(tmp_path: Path, call: Callable[[Path], object]) -> None:
    with pytest.raises(CorpusError, match=r"has no manifest\.json.*penstock data prepare"):
        call(tmp_path)


def test_describe_without_a_tokenizer_has_no_samples(corpus: Path) -> None:
    (corpus / "tokenizer.json").unlink()
    assert describe(corpus).samples == ()


def test_a_corpus_may_be_moved(corpus: Path, tmp_path: Path) -> None:
    before = load_manifest(corpus).fingerprint
    shutil.move(corpus, tmp_path / "moved")
    assert verify(tmp_path / "moved").manifest.fingerprint == before
    assert json.loads((tmp_path / "moved" / "manifest.json").read_text())["format"] == "arrow"
